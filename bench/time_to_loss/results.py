"""What simulated and real runs of time to loss share: a file, and what a user waits for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "time_to_loss.json"
MEASURING, DECIDING_S = 0.011, 0.02
"""Share of a measured step that measuring takes, docs/results/noise_overhead.json, and mean seconds
of a decision in docs/results/time_to_loss_real_clock.jsonl, rounded up."""


def plain(value: Any) -> Any:
    """The same for strict JSON: what is infinite or no number becomes None."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(path: Path, found: Mapping[str, Any]) -> None:
    """Puts results into a file and leaves the others in it as they are."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(plain({**known, **found}), indent=1, allow_nan=False) + "\n")
