"""The batch to begin a run with, if it were to stay: before anything is measured.

On the way to a loss a batch of B needs 1 + B / Phi samples for each unit of progress P, and Phi,
the critical batch size, grows as P^e up to its level at the end. Over the run that is a mean of
1 + B / ((1 - e) level). Published laws give the level to a factor of 4, so that the expected time
is in proportion to

    (1 + B exp(s^2 / 2) / ((1 - e) level)) / T(B),   s = log(4),

T(B) the best throughput of that batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from copus_ext.goodput.belief import EXPONENT, LEVEL_SD, published_critical_batch_size
from copus_ext.goodput.headroom import Saving
from copus_ext.goodput.inputs import ConfigThroughput

_WITHIN = 0.03
"""Share of the time by which a batch may be slower and still be as good."""
HABITUAL_TOKENS = 2**22
"""Tokens of a batch that many runs take by habit, whatever their length."""
_IS_HABITUAL = 1.5
"""Factor by which a batch may be off, either way, and stand for it."""


@dataclass(frozen=True, kw_only=True)
class FirstBatch:
    """The fixed batch with the least expected time, and what is known of others."""

    row: ConfigThroughput
    """Its fastest configuration."""
    least: int
    """Smallest batch that is within 3 % of the best one on some plausible level, samples."""
    most: int
    """Largest such batch, samples."""
    critical_batch_size: float
    """Published level at the end of the run, samples."""
    habitual_batch: int | None
    """Batch of about 4M tokens, samples; None where none was priced, or the run is shorter."""
    habitual_cost: Saving | None
    """Share of time that it takes more than this one: on the published level, and the least and the
    most within a standard deviation of it."""

    @property
    def batch(self) -> int:
        """The batch, samples."""
        return self.row.global_batch_size

    def to_json(self) -> dict[str, Any]:
        cost = self.habitual_cost
        return {
            "global_batch_size": self.batch,
            "layout": str(self.row.layout),
            "micro_batch_size": self.row.micro_batch_size,
            "least": self.least,
            "most": self.most,
            "critical_batch_size": self.critical_batch_size,
            "habitual_batch": self.habitual_batch,
            "habitual_cost": cost and asdict(cost),
        }

    def __str__(self) -> str:
        line = f"a first batch of {self.batch:,} to begin with, on {self.row.layout}"
        if self.least < self.most:
            known = f"the critical batch size is known to a factor of {math.exp(LEVEL_SD):.0f}"
            line += f" (any of {self.least:,} to {self.most:,} may prove as good: {known})"
        return line

    def of_a_plan(self) -> str:
        """The same, with what the habitual batch would cost."""
        if self.habitual_batch is None or self.habitual_cost is None:
            return str(self)
        if self.habitual_batch == self.batch:
            return f"{self}, which is the usual 4M tokens"
        return f"{self}; the usual 4M tokens ({self.habitual_batch:,}) {self._cost()}"

    def of_own(self, batch: int) -> str:
        """Where the batch of a user stands among those."""
        if batch == self.batch:
            return f"your {batch:,} is this one"
        if self.least <= batch <= self.most:
            return f"your {batch:,} is one of those that may prove as good"
        side = "below" if batch < self.least else "above"
        return f"your {batch:,} is {side} what may prove as good"

    def _cost(self) -> str:
        cost = self.habitual_cost
        assert cost is not None
        shares = cost.low, cost.likely, cost.high
        # Whole numbers: a rounded one would be "-0".
        low, likely, high = (round(100 * share) for share in shares)
        if cost.likely < _WITHIN:
            return f"would take about as long ({low} to {high} % more by the critical batch size)"
        return f"would take about {likely} % more time ({low} to {high} by the critical batch size)"


def first_batch(
    rows: Sequence[ConfigThroughput], *, total_samples: float, tokens_per_sample: float
) -> FirstBatch | None:
    """The fixed batch with the least expected time to finish, of those of some configurations.

    Args:
        rows: configurations and their throughputs; one that is assumed says nothing.
        total_samples: of the run; larger batches are left out.
        tokens_per_sample: for the published law.

    Returns:
        The batch; the smaller of equal ones. None where no configuration can be compared.
    """
    fastest: dict[int, ConfigThroughput] = {}
    for row in rows:
        size = row.global_batch_size
        if row.source == "assumed" or size > total_samples:
            continue
        if size not in fastest or row.samples_per_s > fastest[size].samples_per_s:
            fastest[size] = row
    if not fastest:
        return None
    level = published_critical_batch_size(total_samples, tokens_per_sample)
    expected = _seconds(fastest, level / math.exp(LEVEL_SD**2 / 2))
    best = min(expected, key=lambda size: (expected[size], size))
    likely, low, high = (
        _seconds(fastest, level * math.exp(sds * LEVEL_SD)) for sds in (0.0, -1.0, 1.0)
    )
    good = {best}
    for seconds in (expected, likely, low, high):
        bar = (1.0 + _WITHIN) * min(seconds.values())
        good |= {size for size, time in seconds.items() if time <= bar}
    habitual = _nearest(fastest, HABITUAL_TOKENS / tokens_per_sample)
    more = habitual and Saving.over([s[habitual] / s[best] - 1.0 for s in (likely, low, high)])
    return FirstBatch(
        row=fastest[best],
        least=min(good),
        most=max(good),
        critical_batch_size=level,
        habitual_batch=habitual,
        habitual_cost=more or None,
    )


def doublings(unit: int, *, total_samples: float, tokens_per_sample: float) -> list[int]:
    """The batches worth pricing: a unit times powers of two, up to the level and a standard
    deviation of it, or to the habitual batch if that is more.

    Args:
        unit: samples, the smallest batch.
        total_samples: of the run, at least the unit.
        tokens_per_sample: for the published law.
    """
    level = published_critical_batch_size(total_samples, tokens_per_sample)
    habitual = _IS_HABITUAL * HABITUAL_TOKENS / tokens_per_sample
    most = min(max(math.exp(LEVEL_SD) * level, habitual), total_samples)
    return [unit * 2**k for k in range(max(int(math.log2(max(most / unit, 1.0))), 0) + 1)]


def _seconds(rows: dict[int, ConfigThroughput], level: float) -> dict[int, float]:
    """Time of each batch, in units of the progress, where the run ends at a level."""
    return {
        size: (1.0 + size / ((1.0 - EXPONENT) * level)) / row.samples_per_s
        for size, row in rows.items()
    }


def _nearest(rows: dict[int, ConfigThroughput], wanted: float) -> int | None:
    size = min(rows, key=lambda size: abs(math.log(size / wanted)))
    return size if abs(math.log(size / wanted)) <= math.log(_IS_HABITUAL) else None
