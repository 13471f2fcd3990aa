"""Wrong inputs of this extra for `tests.helpers.bad_inputs`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from megatron.trainer.checkpoint.formats import model_formats
from megatron.trainer.extras.convert import command
from tests.helpers import spoil
from tests.helpers.spoiled_checkpoints import CHECKPOINTS


def converted(rng: random.Random, folder: Path) -> str | None:
    """`tools/convert_checkpoint.py`."""
    root, victim = CHECKPOINTS.spoiled(rng, folder)
    ways = [(), ("--dtype", "fp32"), *(("--format", name) for name in model_formats())]
    target = folder / "made"
    before = sorted(folder.iterdir())
    result = spoil.code_of(command.main, root, target, *rng.choice(ways))
    problem = spoil.tool_problem(result, 1, 2, 3, 4, 5)
    if problem is None and result[0] != 0 and sorted(folder.iterdir()) != before:
        problem = f"left {sorted(p.name for p in folder.iterdir())} with exit code {result[0]}"
    return problem and f"{victim.relative_to(root)}: {problem}"


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {"conversion": converted}
"""What can be wrong, and its check."""
FEW = {"conversion": 12}
"""Of ten thousand, for what takes milliseconds or more."""
