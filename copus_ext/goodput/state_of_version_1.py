"""The controller's state as checkpoints of version 1 hold it, read for one release."""

from __future__ import annotations

from typing import Any

from megatron.training.config.layout import Layout

RETIRED = "above_optimal_since_samples"
"""A field that checkpoints of 2026 still hold and that nothing depends on any more."""
_STEP = ("consumed_samples", "global_batch_size", "loss", "seconds", "updated")
_NAMES = {
    "since_change": "steps_after_change",
    "spikes_in_a_row": "consecutive_spikes",
    "small_since_samples": RETIRED,
    "noise_when_shrunk": "critical_batch_size_when_shrunk",
    "times": "step_times",
    "open": "open_change",
    "layouts": "layout_costs",
}


def upgraded(old: dict[str, Any]) -> dict[str, Any]:
    """The state of a checkpoint of before in the present form."""
    data = {_NAMES.get(name, name): value for name, value in old.items()}
    sizes = data.pop("sizes") or (None, None)
    costs = dict(data.get("layout_costs") or {})
    costs["failed"] = [
        {"start": start and _layout_text(start), "to": _layout_text(to), "reason": reason}
        for start, to, reason in costs.pop("barred", [])
    ]
    costs["pending_relaunch"] = costs.pop("left", None)
    return {
        **data,
        "version": 2,
        "global_batch_size": sizes[0],
        "micro_batch_size": sizes[1],
        "steps": [dict(zip(_STEP, [*step[:4], bool(step[4])])) for step in data["steps"]],
        "layout_costs": costs,
    }


def _layout_text(value: str | list[int]) -> str:
    return str(Layout.from_record(value))
