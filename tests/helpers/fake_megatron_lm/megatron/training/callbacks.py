"""Names that a recent checkout has of its own, and ours would find instead of our own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class CallbackContext:
    """What that trainer's callbacks are given."""

    model: Any
    user_state: dict[str, Any] = field(default_factory=dict)


class Callback:
    """Does nothing."""

    def on_train_start(self, context: CallbackContext) -> None:
        """The loop begins."""
