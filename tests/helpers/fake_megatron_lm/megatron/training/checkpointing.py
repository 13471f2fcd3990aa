"""Where a checkout looks at the arguments of a checkpoint. Nothing is saved here."""

from __future__ import annotations

from typing import Any


def check_checkpoint_args(checkpoint_args: Any) -> None:
    """Everything goes."""
