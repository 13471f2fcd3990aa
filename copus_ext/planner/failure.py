"""What an answer says of a batch for which no configuration is sure to fit."""

from __future__ import annotations

from dataclasses import replace

from copus_ext.planner.better_machine import min_gpus
from copus_ext.planner.plan import Plan
from copus_ext.planner.search import Planner
from copus_ext.planner.timed import contradicts


def with_fix(planner: Planner, plan: Plan) -> Plan:
    """A plan without rows, with what would help in place of more GPUs where they would not."""
    if plan.status != "none_fits":
        return plan
    if contradicts(planner):
        fix = "all this follows a report that contradicts its prediction: check that first"
        return _fixed(plan, fix)
    needed, unsure = min_gpus(planner, plan.global_batch_size), bool(plan.tries)
    fix = f"needs about {needed} GPUs of this kind"
    if needed is not None:
        fix += " to be sure" * unsure
    elif unsure:
        fix = "try 1 may fit on these GPUs, and on more of them none is sure to fit either"
    else:
        fix = "more of these GPUs do not help; use GPUs with more memory"
    return _fixed(plan, fix)


def _fixed(plan: Plan, fix: str) -> Plan:
    found = [replace(r, fix=fix) if r.code == "memory" else r for r in plan.rejected]
    return replace(plan, rejected=found)


def failure(plan: Plan) -> str:
    """One line on a batch without rows, which has its fix (`with_fix`)."""
    where = f"--global-batch-size {plan.global_batch_size}"
    if plan.status == "no_legal":
        worst = min(plan.rejected, key=lambda r: (r.code == "memory", -r.count))
        return f"{where}: {worst.detail}; {worst.fix}"
    memory = next(r for r in plan.rejected if r.code == "memory")
    likely = max((one.prediction.fit_probability for one in plan.tries), default=None)
    none = "none fits" if likely is None else f"none sure to fit, the likeliest with {likely:.2f}"
    what = f"{memory.count} legal configurations, {none}, the smallest"
    return f"{where}: {what}: {memory.detail}; {memory.fix}"
