"""Why ranks did not meet, in the words of the variables that say where."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from megatron.trainer.common.errors import TrainingFailure, UsageError


def meeting_error(
    error: Exception, env: Mapping[str, str], *, timeout_minutes: float
) -> UsageError | TrainingFailure:
    """One line for an error of torch's store.

    Args:
        error: `DistNetworkError` or `DistStoreError`.
        env: environment with MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.
        timeout_minutes: how long the ranks have waited at most.

    Returns:
        Wrong usage where the variables cannot work; else a failure, as another start may succeed.
    """
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    rank, size = env.get("RANK", "0"), env.get("WORLD_SIZE", "1")
    told = str(error).splitlines()[0] if str(error) else type(error).__name__
    place = f"MASTER_ADDR {address}, MASTER_PORT {port}"
    another = (
        "unset MASTER_PORT, which one process does not need"
        if size == "1"
        else "give all ranks another MASTER_PORT (torchrun: --standalone, or --master-port)"
    )
    if "EADDRINUSE" in told or "address already in use" in told.lower():
        return UsageError(f"MASTER_PORT {port} is in use on this machine; {another}")
    if "EACCES" in told or "permission denied" in told.lower():
        return UsageError(f"MASTER_PORT {port} may not be opened by this user; {another}")
    if "failed to listen" in told:
        return UsageError(f"MASTER_PORT {port} cannot be opened ({told}); {another}")
    if "Ping failed" in told:
        return UsageError(f"at {place} another program answers than rank 0 of this run; {another}")
    if not _is_known(address):
        fix = "give the address of the node of rank 0"
        return UsageError(f"MASTER_ADDR {address} is not the name of a host here; {fix}")
    longer = "--distributed-timeout-minutes waits longer"
    if "waiting for clients" in told:
        _, _, come = told.rpartition("clients. ")
        return TrainingFailure(
            f"not all ranks came within {timeout_minutes:g} min ({come or told}); start all "
            f"{size} of them with the same MASTER_ADDR and MASTER_PORT, or see the output of those "
            f"that are missing; {longer}"
        )
    if "timed out" in told.lower() or "refused" in told.lower():
        return TrainingFailure(
            f"rank {rank} of {size} has met no rank 0 at {place} within {timeout_minutes:g} min; "
            f"see whether rank 0 runs there and the port is open to this node; {longer}"
        )
    return TrainingFailure(f"the ranks did not meet at {place}: {told}")


def _is_known(address: str) -> bool:
    """Whether a name can be resolved on this node."""
    try:
        socket.getaddrinfo(address, None)
    except (OSError, UnicodeError):
        return False
    return True
