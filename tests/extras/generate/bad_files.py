"""Wrong inputs of this extra for `tests.helpers.bad_inputs`."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from megatron.trainer.common.errors import UsageError
from megatron.trainer.extras.generate.command import _prompt_in
from tests.helpers import spoil


def prompt(rng: random.Random, folder: Path) -> str | None:
    """A line of a file of prompts."""
    text = spoil.spoiled_json(rng, {"text": "once upon a time \u00e9"}).decode(errors="replace")
    return spoil.problem_of(lambda: _prompt_in(text, "line 1"), UsageError)


KINDS: dict[str, Callable[[random.Random, Path], str | None]] = {"prompt": prompt}
