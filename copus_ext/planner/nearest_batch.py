"""The nearest global batch that trains faster than one that few layouts can split."""

from __future__ import annotations

from copus_ext.cost_model.model_spec import divisors
from copus_ext.planner.equals import EQUAL
from copus_ext.planner.plan import BetterBatch, Plan
from copus_ext.planner.search import Planner

_FAR = 6
"""A batch is near that differs by no more than one part in so many, or by 1."""
_MOST = 0.8
"""Share of the greatest gain nearby from which on a nearer batch will do."""


def near_batches(batch: int, world_size: int) -> list[int]:
    """Multiples near a batch of those numbers of replicas that do not divide it, the nearest
    first."""
    found: set[int] = set()
    for replicas in divisors(world_size):
        below = batch // replicas * replicas
        if below != batch:
            found |= {below, below + replicas}
    near = [x for x in found if x and abs(x - batch) <= max(1, batch // _FAR)]
    return sorted(near, key=lambda x: (abs(x - batch), x))


def better_batch(planner: Planner, plan: Plan) -> BetterBatch | None:
    """The nearest batch whose fastest layout trains more tokens a second than that of a plan, by
    more than is too little to tell; None where there is none, or batches are rounded."""
    near = near_batches(plan.global_batch_size, planner.cluster.world_size)
    if plan.fastest is None or planner.limits.round_down or not near:
        return None
    speed = plan.global_batch_size / plan.fastest[1]
    found = [
        BetterBatch(
            global_batch_size=other.global_batch_size,
            gain=other.global_batch_size / other.fastest[1] / speed - 1,
            configuration=other.fastest[0],
            step_s=other.fastest[1],
        )
        for other in planner.rank(near, top=1, reasons=False)
        if other.fastest is not None
    ]
    most = max((one.gain for one in found), default=0.0)
    return next((one for one in found if one.gain >= max(EQUAL, _MOST * most)), None)
