"""Changes the layout of a running job in the same processes: new groups and a new model, while the
optimizer state goes from rank to rank without a disk.

A change ends in one of three ways: the job trains on under the new layout or under the old one, or
it leaves to be launched again from its last checkpoint. Every phase ends with a vote of all ranks.
Until the last vote every rank keeps its old state, from which the old layout can be rebuilt.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from copus_ext.goodput import costs
from copus_ext.reshard.change import Change, ReshardContext
from copus_ext.reshard.consensus import Consensus, Deadline, NoAnswer
from copus_ext.reshard.group_store import GroupStore
from copus_ext.reshard.host import LayoutHost
from copus_ext.reshard.phases import ReshardResult
from megatron.trainer.common.control import STACKS
from megatron.trainer.common.errors import Relaunch
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.config.layout import Layout
from megatron.trainer.resilience.watchdog import exit_immediately

logger = logging.getLogger(__name__)

_PATIENCE_S = {"gloo": 10.0, "nccl": 3.0}
"""By backend. Whoever waits for NCCL waits on the GPU, for ever, and can only be launched again; on
gloo a rank may still see the connection end, and then takes the way back with the others."""
_SILENCE_PER_PATIENCE = 3.0


class InProcessResharder:
    """Changes the layout of one job; every rank makes one and calls the same methods.

    Args:
        run_dir: of the run, on every rank; stacks of a change that hangs go there.
        note: writes the journal, on rank 0; called with a kind and fields.
        sample: verify a sixteenth of the tensors instead of all.
        fault: called with the topic of each part of a phase as it begins (see `change`); lets tests
            break a change.
        patience_s: see `Deadline`; None as the backend has it. A rank counts as dead after three
            times as long, or as that of gloo.
        min_timeout_s: a change may take at least so long before it counts as hung.
        prebuild: number of layouts whose groups are kept or built before they are needed.
    """

    def __init__(
        self,
        *,
        run_dir: Path | None = None,
        note: Callable[..., None] = lambda kind, **fields: None,
        sample: bool = False,
        fault: Callable[[str], None] = lambda phase: None,
        patience_s: float | None = None,
        min_timeout_s: float = costs.MIN_TIMEOUT_S,
        prebuild: int = 0,
    ) -> None:
        self._run_dir, self._note = run_dir, note
        self._patience_s, self._silence_s = limits_s(patience_s, str(dist.get_backend()))
        self._min_timeout_s = min_timeout_s
        self._store = dist.PrefixStore(_launch_name(), _store_of_launch())
        # Not one of megatron-core's, so that taking those down leaves it.
        self._group: Any = dist.new_group()
        self._count = 0
        self._context = ReshardContext(
            group=lambda: self._group,
            renew_group=self._renew_group,
            store=GroupStore(prebuild),
            note=note,
            fault=fault,
            is_sample=sample,
            message_timeout_s=min_timeout_s,
        )

    def close(self) -> None:
        """Destroys its own groups. All ranks."""
        self._context.store.close()
        self._close_group()

    def _close_group(self) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _renew_group(self) -> None:
        self._close_group()
        self._group = dist.new_group()

    def build_ahead(self, host: LayoutHost, layouts: Iterable[Layout]) -> int:
        """Builds the groups of layouts that may come next, most likely first. Skips those that the
        model cannot have. All ranks, at a step boundary.

        Returns:
            How many layouts were built.
        """
        others: dict[Layout, Callable[[], Any]] = {}
        for layout in layouts:
            with contextlib.suppress(ValueError):
                others[layout] = functools.partial(host.build_groups, host.target(layout))
        return self._context.store.build_ahead(host.layout, others)

    def move(
        self, host: LayoutHost, layout: Layout, settings: StepSettings, *, predicted_s: float = 0.0
    ) -> ReshardResult:
        """Changes the layout. All ranks take part, at a step boundary.

        Args:
            host: the job, at a boundary.
            settings: of the steps after the change.
            predicted_s: expected seconds of the change.

        Returns:
            The result; the job can train on in any case.

        Raises:
            Relaunch: the job must be started again. Raised on every rank that is alive.
        """
        self._count += 1
        timeout_s = costs.timeout_s(predicted_s, self._min_timeout_s)
        consensus = Consensus(
            self._store,
            str(self._count),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            timeout_s=timeout_s,
        )
        deadline = Deadline(
            consensus,
            deadline_s=2 * timeout_s,
            patience_s=self._patience_s,
            silence_s=self._silence_s,
            on_expire=self._exit_immediately,
        )
        with deadline:
            change = Change(self._context, host, layout, settings, consensus, deadline)
            try:
                return change.run()
            except NoAnswer as error:
                consensus.abort()
                self._dump_stacks()
                raise Relaunch(f"changing the layout to {layout} failed: {error}") from error
            finally:
                change.forget()

    def _exit_immediately(self, reason: str) -> None:
        """Ends this process, which waits in a collective that nothing can cancel."""
        try:
            self._dump_stacks()
            rank = dist.get_rank()
            message = f"copus: rank {rank} leaves a change of layout: {reason}"
            print(message, file=sys.stderr, flush=True)
            if rank == 0:
                self._note("relayout.abandoned", reason=reason)
        finally:
            exit_immediately(Relaunch.exit_code)

    def _dump_stacks(self) -> None:
        if self._run_dir is None:
            return
        path = self._run_dir / STACKS / f"relayout-{self._count}-rank{dist.get_rank()}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                faulthandler.dump_traceback(file)
        except OSError as error:
            logger.warning("the stacks cannot be written: %s", error)


def limits_s(patience_s: float | None, backend: str) -> tuple[float, float]:
    """The patience and the silence of a `Deadline`, in seconds."""
    usual = _PATIENCE_S["gloo"] if patience_s is None else patience_s
    patience = patience_s or _PATIENCE_S.get(backend, usual)
    return patience, _SILENCE_PER_PATIENCE * usual


def _store_of_launch() -> Any:
    return dist.distributed_c10d._get_default_store()


def _launch_name() -> str:
    """A prefix that no earlier resharder of this launch has used."""
    number = int(_store_of_launch().add(f"copus-resharders/{dist.get_rank()}", 1))
    return f"copus-resharder-{number}"
