"""Wrong inputs of this extra for `tests.helpers.bad_inputs`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from megatron.trainer.checkpoint import files
from megatron.trainer.common.errors import Refused
from megatron.trainer.extras.inspect_checkpoint import command
from megatron.trainer.extras.inspect_checkpoint.archive import _check_format
from tests.helpers import spoil
from tests.helpers.spoiled_checkpoints import CHECKPOINTS


def inspected(rng: random.Random, folder: Path) -> str | None:
    """`tools/inspect_checkpoint.py --verify`."""
    root, victim = CHECKPOINTS.spoiled(rng, folder)
    result = spoil.code_of(command.main, root, "--verify")
    problem = spoil.tool_problem(result, 1, 2, 3, 4, 5)
    if problem is None and result[0] == 0 and victim.parent != root and _is_damaged(victim.parent):
        problem = "the damage was not seen"
    return problem and f"{victim.relative_to(root)}: {problem}"


def _is_damaged(folder: Path) -> bool:
    """Whether the manifest is gone, or it and the files differ. One that says the same in other
    words is none the worse."""
    try:
        listed = files.read_manifest(folder)
    except ValueError:
        return True
    return listed != files.checksums(folder, files.data_files(folder))


def mark(rng: random.Random, folder: Path) -> str | None:
    """The mark of megatron-core: which format a checkpoint has."""
    whole = {"sharded_backend": "torch_dist"}
    (folder / files.CORE_MARK).write_bytes(spoil.spoiled_json(rng, whole))
    return spoil.problem_of(lambda: _check_format(folder), Refused)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {
    "checkpoint": inspected,
    "mark": mark,
}
"""What can be wrong, and its check."""
FEW = {"checkpoint": 12}
"""Of ten thousand, for what takes milliseconds or more."""
