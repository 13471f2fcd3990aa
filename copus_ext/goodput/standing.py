"""Where a run stands, from its record: what a decision is taken from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from copus_ext.gns.observer import NoiseObserver
from copus_ext.goodput.costs import Costs
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs, Rules
from copus_ext.goodput.lr_scaling import Ramp
from copus_ext.goodput.state import History
from megatron.training.config.layout import Layout


def standing(
    rules: Rules,
    *,
    rows: Sequence[ConfigThroughput],
    current: int,
    layout: Layout,
    history: History,
    observer: NoiseObserver,
    costs: Costs,
    **position: Any,
) -> DecisionInputs:
    """The situation after a step.

    Args:
        rules: of its decisions.
        rows: configurations to choose from.
        current: index of the present one.
        layout: present one.
        history: its record.
        observer: of the noise scale.
        costs: of changing the layout.
        position: `iteration`, `consumed_samples`, `total_samples`, `in_warmup`, `lr_decay_factor`
            and `paused` of a `DecisionInputs`.
    """
    record = history.record
    ramp = record["ramp"]
    return DecisionInputs(
        rules=rules,
        noise=observer.noise(),
        rows=tuple(rows),
        current=current,
        half_life_samples=observer.half_life_samples,
        elapsed_s=record["elapsed_s"],
        in_ramp=ramp is not None and not Ramp(**ramp).is_over(position["iteration"]),
        steps_since_change=history.steps_since_change,
        skipped_steps=history.skipped_steps,
        last_change_samples=record["last_change_samples"],
        hold_growth_until_samples=record["hold_growth_until_samples"],
        small_since_samples=record["small_since_samples"],
        noise_when_shrunk=record["noise_when_shrunk"],
        **position,
        **costs.of(layout),
    )
