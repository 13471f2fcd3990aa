"""Lines for the operator."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Prints a line for the operator."""
    print(f"supervisor: {line}", file=sys.stderr, flush=True)
