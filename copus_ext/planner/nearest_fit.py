"""Which small change lets a configuration fit that does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.plan import Ranked
from copus_ext.planner.search import Planner


def cheapest_change(planner: Planner, c: Configuration) -> tuple[str, Ranked] | None:
    """The fastest configuration on the same layout that fits and differs in one option, or in one
    besides full recomputation, with its change in words; None where none fits."""
    one = [*_fitting(planner, c, _changes(planner, c))]
    if not one:
        full = replace(c, recompute="full", recompute_num_layers=0)
        both = ({"recompute": "full", **x} for x in _changes(planner, full) if "recompute" not in x)
        one = [*_fitting(planner, c, both)]
    return min(one, key=lambda found: found[1].prediction.step_s, default=None)


def _changes(planner: Planner, c: Configuration) -> Iterator[dict[str, Any]]:
    """Options that need less memory than those of a configuration has."""
    if c.recompute == "none":
        yield {"recompute": "selective"}
    if c.recompute != "full":
        layers = planner.model.num_layers // (c.layout.pp * c.layout.vpp)
        few = c.recompute_num_layers + 1
        for number in sorted({few, *(layers * part // 4 for part in (1, 2, 3)), layers - 1}):
            if few <= number < layers:
                yield {"recompute": "block", "recompute_num_layers": number}
        yield {"recompute": "full", "recompute_num_layers": 0}
    if not c.use_distributed_optimizer and c.layout.copies > 1:
        yield {"use_distributed_optimizer": True}
    if not c.sequence_parallel and c.layout.tp > 1:
        yield {"sequence_parallel": True}
    for chunks in planner.limits.logits_chunks:
        if chunks > c.logits_chunks:
            yield {"logits_chunks": chunks}
    size = c.micro_batch_size
    while size > 1:
        size //= 2
        yield {"micro_batch_size": size}


def _fitting(planner: Planner, c: Configuration, changes: Any) -> Iterator[tuple[str, Ranked]]:
    """Those changes with which a configuration is legal and fits."""
    for change in changes:
        other = replace(c, **change)
        try:
            found = planner.explain(other)
        except SpecError:
            continue
        if isinstance(found, Ranked):
            yield _words(c, other), found


def _words(c: Configuration, other: Configuration) -> str:
    """What another configuration has that one has not, as CONFIG spells it."""
    own = str(c).split(",")
    return ",".join(part for part in str(other).split(",") if part not in own)
