"""The policy of arXiv 2604.26687: eq. 8 and Algorithm 2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from copus_ext.goodput.inputs import (
    NEVER_PAYS,
    PRESENT,
    TOO_LITTLE,
    Candidate,
    ConfigThroughput,
    DecisionInputs,
)
from copus_ext.goodput.policy import WARMING_UP, Weighed, unknown_noise

MARGIN, _ROUNDING = 0.10, 1e-12
"""A tenth must be left of a gain; whatever the rounding of 1 + 0.1 is, a tenth meets it."""


@dataclass(frozen=True, kw_only=True)
class _Paper:
    needs_noise: bool = True
    is_schedule: bool = False

    def weigh(self, s: DecisionInputs) -> Weighed:
        """Configurations by T sqrt(B) / (B + C), whose root stands for the learning rate. Nothing
        changes while the rate warms up, or before the noise scale is known."""
        unknown = WARMING_UP if s.in_warmup else unknown_noise(s)
        present = Candidate(row=s.now, gain=0.0, needed=None, blocked_reason=PRESENT)
        if unknown:
            return Weighed(candidates=[present], unknown=unknown)
        scored = [(goodput(s, row), row) for row in _considered(s)]
        base = goodput(s, s.now)
        if s.now.noise_unmeasurable:
            base = 0.0  # any measurable one is better
        found = [(1.0, present)]
        for value, row in scored:
            cost_s = s.cost_s(row.layout)
            gain = None if not base else value / base - 1.0
            needed = _needed(s, cost_s)
            fits = gain is None or gain > needed
            lacks = NEVER_PAYS if math.isinf(needed) else TOO_LITTLE
            found.append(
                (
                    value / (base or 1.0) * _discount(s, cost_s),
                    Candidate(
                        row=row,
                        gain=gain,
                        needed=None if gain is None or math.isinf(needed) else needed,
                        gain_sd=None if gain is None else 0.0,
                        blocked_reason="" if fits else lacks,
                    ),
                )
            )
        found.sort(key=lambda pair: (-pair[0], pair[1].row.layout != s.now.layout))
        own = [(value, row) for value, row in scored if row.layout == s.now.layout]
        best = max([*own, (base, s.now)], key=lambda pair: pair[0])[1]
        return Weighed(
            candidates=[c for _, c in found],
            target_batch=float(best.global_batch_size),
            goes_by=s.critical_batch_size_words,
        )


def goodput(s: DecisionInputs, row: ConfigThroughput) -> float:
    """Eq. 8 without its constants: T sqrt(B) / (B + C), largest at B = C for a flat throughput."""
    batch, critical = row.global_batch_size, s.critical_batch_size
    assert critical is not None
    return row.samples_per_s * math.sqrt(batch) / (batch + critical)


def _considered(s: DecisionInputs) -> list[ConfigThroughput]:
    """The fastest micro-batch of every layout and batch that one change may take."""
    now = s.now.global_batch_size
    least = 0 if s.rules.allow_shrink else now
    best: dict[tuple, ConfigThroughput] = {}
    for row in s.rows:
        size = row.global_batch_size
        is_near = least <= size <= now * s.rules.growth
        if row == s.now or size not in {*s.rules.grid, now} or not is_near:
            continue
        known = best.setdefault((row.layout, size), row)
        if row.samples_per_s > known.samples_per_s:
            best[row.layout, size] = row
    return list(best.values())


def _needed(s: DecisionInputs, cost_s: float) -> float:
    """The gain of which a tenth is left after the discount."""
    left = _discount(s, cost_s)
    return (1.0 + MARGIN) / left - 1.0 - _ROUNDING if left > 0 else math.inf


def _discount(s: DecisionInputs, cost_s: float) -> float:
    """What Algorithm 2 multiplies another layout's goodput by: T_useful / (T_elapsed + c)."""
    if cost_s == 0:
        return 1.0
    return max(s.elapsed_s - s.paused_s, 0.0) / (s.elapsed_s + cost_s)


PAPER = _Paper()
