"""What another cut of the layers would give the configurations that a search ranked.

The ranking itself is of even cuts. Both times are the cost model's, whatever was measured.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from copus_ext.planner.answers import Plan
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.cuts import Cut, best_cut, price_cut, problem_of
from copus_ext.planner.search import Planner


@dataclass(frozen=True, kw_only=True)
class Recut:
    """A ranked configuration and its fastest cut."""

    rank: int
    """Place in the ranking, from 1."""
    configuration: Configuration
    """What was ranked, cut evenly."""
    even_step_s: float
    """Seconds of its step."""
    cut: Cut
    """The fastest that fits, which may be the even one."""

    @property
    def gain(self) -> float:
        """Share of the even step that the cut saves."""
        return 1 - self.cut.step_s / self.even_step_s

    @property
    def flags(self) -> list[str]:
        """Megatron's flags of the configuration with the cut."""
        flags, own = self.configuration.to_flags(), self.cut.to_flags()
        for name in (own[0], "--num-virtual-stages-per-pipeline-rank"):
            if name in flags:
                at = flags.index(name)
                del flags[at : at + 2]
        return [*flags[:2], *own, *flags[2:]]

    def __str__(self) -> str:
        """One line for a table."""
        surely = "" if self.cut.proved else f", at best {self.cut.least_step_s:.4g} s"
        return (
            f"rank {self.rank} cut {self.cut}: {self.cut.step_s:.4g} s instead of "
            f"{self.even_step_s:.4g} s ({100 * self.gain:.1f} % less{surely}): "
            f"{shlex.join(self.cut.to_flags())}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "rank": self.rank,
            "even_step_s": self.even_step_s,
            "gain": self.gain,
            "cut": self.cut.to_json(),
            "flags": self.flags,
        }


def recuts(planner: Planner, plan: Plan) -> list[Recut]:
    """The fastest cuts of a plan's pipelines; those recomputed by blocks are left as they are.

    Args:
        planner: that made the plan.
        plan: what it ranked.
    """
    found = []
    for i, ranked in enumerate(plan.ranked):
        c = ranked.configuration
        if c.layout.pp == 1 or c.recompute == "block":
            continue
        problem = problem_of(
            planner.model,
            planner.cluster,
            c,
            limit_bytes=planner.safe_bytes,
            constants=planner.constants,
        )
        each = planner.model.num_layers // problem.num_chunks
        even = price_cut(problem, [each] * problem.num_chunks)
        cut = best_cut(problem)
        # None fits where a measured peak, not the predicted one, let the even cut in.
        if isinstance(cut, Cut):
            better = cut if cut.step_s < even.step_s else even
            found.append(Recut(rank=i + 1, configuration=c, even_step_s=even.step_s, cut=better))
    return found


def lines(found: Sequence[Recut]) -> list[str]:
    """What a table says of them, the fastest first."""
    uneven = [x for x in found if not x.cut.is_even]
    same = len(found) - len(uneven)
    told = [str(x) for x in sorted(uneven, key=lambda x: (x.cut.step_s, x.rank))]
    return [*told, f"{same} of {len(found)} ranked pipelines are fastest with even stages"]
