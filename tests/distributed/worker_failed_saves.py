"""Saves that one rank alone cannot finish; writes what every rank was told.

worker_failed_saves.py OUTPUT_DIR
"""

from __future__ import annotations

import errno
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.helpers.jobs import join, run

TOO_SMALL_BYTES = 30_000


@contextmanager
def no_room_for_data() -> Iterator[None]:
    """No file may grow larger than a part of this rank's share."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (TOO_SMALL_BYTES, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def full(*_: Any, **__: Any) -> None:
    """Fails as a write on a full disk does."""
    raise OSError(errno.ENOSPC, "No space left on device")


def main(output: Path) -> None:
    """Writes by case the error of each rank."""
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

    from megatron.training.agree import everyone
    from megatron.training.errors import TrainingFailure
    from megatron.training.parallel import destroy_groups

    join()
    faults = {
        "data": (1, no_room_for_data),
        "common.pt": (0, lambda: mock.patch.object(TorchCommonSaveStrategy, "save_common", full)),
        "metadata.json": (0, lambda: mock.patch.object(serialization, "save_config", full)),
    }
    told = {}
    for mode in ("sync", "async"):
        for name, (rank, fault) in faults.items():
            save = output / f"{name}-{mode}"
            flags = ["--save", str(save), "--train-iters", "4", "--exit-interval", "2"]
            flags += ["--use-distributed-optimizer"]
            flags += ["--async-save"] if mode == "async" else []
            run(flags, output / "run")
            error = None
            try:
                if dist.get_rank() == rank:
                    with fault():
                        run([*flags, "--load", str(save)], output / "run")
                else:
                    run([*flags, "--load", str(save)], output / "run")
            except TrainingFailure as failure:
                error = str(failure)
                destroy_groups()
            told[save.name] = everyone(error)
    if dist.get_rank() == 0:
        (output / "result.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
