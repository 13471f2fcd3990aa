"""What extras add to the cost of a step: their flags in a model, and the sum of their terms."""

from __future__ import annotations

import functools
from dataclasses import fields
from operator import add
from typing import Any

from copus_ext.cost_model.rows import ConfigBatch
from megatron.trainer.common.extras import CostTerms, defaults_of, extras, extras_with

_NOTHING = CostTerms()
_OF_THE_PLANNER = ("cost_terms", "layout_problems", "batch_problems")


def planned_flags(args: Any) -> dict[str, Any]:
    """What the planner keeps of the extras that cost something or limit layouts or batches; see
    `Extra.planned`.

    Args:
        args: parsed flags, or anything with the same attributes.

    Raises:
        UsageError: a value that no launch takes.
    """
    found: dict[str, Any] = {}
    for extra in extras():
        if (planned := extra.get("planned")) is not None:
            found |= planned(vars(args))
        elif any(getattr(extra, what) for what in _OF_THE_PLANNER):
            defaults = defaults_of(extra)
            own = {name: getattr(args, name, default) for name, default in defaults.items()}
            if own != defaults:
                found |= {name: value for name, value in own.items() if is_number(value)}
    return found


def is_number(value: Any) -> bool:
    """Whether a flag can be a column of `ConfigBatch.extras`."""
    return isinstance(value, (bool, int, float))


def terms_of(rows: ConfigBatch) -> CostTerms:
    """The terms of all extras that some rows have on, added up."""
    terms = [_NOTHING] + [
        cost_terms(rows)
        for extra, cost_terms in extras_with("cost_terms")
        if not rows.extras.keys().isdisjoint(defaults_of(extra))
    ]
    names = (f.name for f in fields(CostTerms))
    return CostTerms(**{n: functools.reduce(add, (getattr(t, n) for t in terms)) for n in names})
