"""Reading JSON that people wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:
    """The value that a file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or nested too deeply.
    """
    try:
        return json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
