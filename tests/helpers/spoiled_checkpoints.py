"""Small checkpoints of which one file is wrong."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from tests.helpers import spoil
from tests.helpers.checkpoints import make_checkpoint


class Checkpoints:
    """A small checkpoint, copied for each case."""

    def __init__(self) -> None:
        self._whole: Path | None = None

    def spoiled(self, rng: random.Random, folder: Path) -> tuple[Path, Path]:
        """A `--save` directory in which one file is wrong, and that file."""
        if self._whole is None or not self._whole.exists():
            self._whole = folder.parent / "whole"
            make_checkpoint(self._whole, ours=True)
        root = folder / "save"
        shutil.copytree(self._whole, root)
        victim = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
        spoil.spoil_file(rng, victim)
        return root, victim


CHECKPOINTS = Checkpoints()
