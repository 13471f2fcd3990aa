"""A configuration that was left is not taken up again on account of what wobbles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import ConfigThroughput, Decision, build_inputs
from copus_ext.goodput.state import ControllerState, config_key, key_of
from tests.helpers.recorded import row, shipped_rules
from tests.unit.test_decide import noise

BATCHES = (8, 16, 32)
TOTAL, EVERY = 200_000, 10
Speeds = Callable[[int, int], float]


class Run:
    """A run whose noise scale and step times are given, decided every ten steps.

    Args:
        rows: configurations with their true speeds, the first one at the start.
        phi: of a decision's number, its estimate of the noise scale.
        sd: of the logarithm of that.
        jitter: of a decision's number, what its steps take over the usual.
    """

    def __init__(
        self,
        rows: Sequence[ConfigThroughput],
        phi: Callable[[int], float],
        *,
        sd: float,
        jitter: Callable[[int], float] = lambda i: 1.0,
        predicted: Callable[[ConfigThroughput], float] = lambda r: r.samples_per_s,
        flags: dict[str, Any] | None = None,
    ) -> None:
        self.rows, self.phi, self.sd, self.jitter = rows, phi, sd, jitter
        self.predicted, self.state, self.samples, self.step = predicted, ControllerState(), 0, 0
        self.rules = shipped_rules(flags=flags or {}, grid=BATCHES)
        self.now = rows[0]
        self.way = [self.now.global_batch_size]
        self.kept: list[ConfigThroughput] = [self.now]
        self.decisions: list[Decision] = []

    def go(self, number: int) -> Run:
        """Decides so many times."""
        for i in range(number):
            self._train(self.jitter(i))
            self._decide(i)
        return self

    def _train(self, jitter: float) -> None:
        now = self.now
        for _ in range(EVERY):
            self.step += 1
            self.samples += now.global_batch_size
            self.state.record_step(
                key=key_of(now.configuration),
                consumed_samples=self.samples,
                batch=now.global_batch_size,
                loss=2.0,
                seconds=jitter * now.global_batch_size / now.samples_per_s,
                iteration=self.step,
            )

    def _known(self, r: ConfigThroughput) -> ConfigThroughput:
        measured = self.state.measured_step_time(r.configuration)
        if measured is not None:
            speed = r.global_batch_size / measured[0]
            return replace(r, samples_per_s=speed, relative_sd=0.01, source="measured")
        return replace(r, samples_per_s=self.predicted(r), relative_sd=0.05, source="corrected")

    def _decide(self, i: int) -> None:
        rows = [self._known(r) for r in self.rows]
        inputs = build_inputs(
            self.rules,
            self.state,
            noise=noise(self.phi(i), sd=self.sd),
            half_life_samples=200.0,
            rows=rows,
            current=self.rows.index(self.now),
            iteration=self.step,
            consumed_samples=self.samples,
            total_samples=TOTAL,
            in_warmup=False,
            lr_decay_factor=1.0,
            paused=False,
        )
        decision = decide(inputs)
        self.decisions.append(decision)
        self.state.record_decision(consumed_samples=self.samples, scheduled=None)
        if decision.kind == "stay":
            return
        to = self.rows[rows.index(decision.to)]
        self.state.record_outcome(now=True)
        self.state.apply(
            ConfigChange(
                decision=i,
                consumed_samples=self.samples,
                from_batch=self.now.global_batch_size,
                to_batch=to.global_batch_size,
                from_micro_batch=self.now.micro_batch_size,
                to_micro_batch=to.micro_batch_size,
                from_layout=str(self.now.layout),
                to_layout=str(to.layout),
            ),
            ramp=None,
            critical_batch_size=decision.critical_batch_size,
            by_bound=decision.critical_batch_size_is_bound,
        )
        self.now = to
        self.kept.append(to)
        if to.global_batch_size != self.way[-1]:
            self.way.append(to.global_batch_size)


def returns(way: Sequence[Any]) -> int:
    """How often a run came back to what it had just left."""
    return sum(a == c for a, c in zip(way, way[2:]))


def table(micros: Sequence[int] = (4,)) -> list[ConfigThroughput]:
    return [row(b, 100.0 * b / (b + 24), micro=m) for b in BATCHES for m in micros]


@pytest.mark.parametrize("early_steps", [0.0, 10.0, 100.0])
@pytest.mark.parametrize("sd", [0.05, 0.25, 0.6])
def test_a_noise_scale_that_wobbles_within_its_doubt_turns_no_batch_round(
    sd: float, early_steps: float
) -> None:
    """Around the switching point, from one end of its interval to the other: the worst case."""
    for middle in np.geomspace(2.0, 60.0, 12):
        for period in (1, 2, 3, 5):
            sign = lambda i, n=period: (-1) ** (i // n)  # noqa: E731
            run = Run(
                table(),
                lambda i, m=middle, f=sign: m * math.exp(1.96 * sd * f(i)),
                sd=sd,
                flags={"copus_early_steps": early_steps},
            ).go(60)
            assert returns(run.way) == 0, (middle, period, run.way)


@pytest.mark.parametrize("seed", range(6))
def test_timings_that_wobble_make_no_swing(seed: int) -> None:
    """Steps that take longer now and then move neither batch nor micro-batch to and fro. The first
    timing of what nobody had timed may undo a change once."""
    rng = np.random.default_rng(seed)
    speed = {b: 100.0 * b / (b + 24) * float(np.exp(rng.normal(0, 0.05))) for b in BATCHES}
    rows = [row(b, speed[b] * (1.0 + 0.01 * m), micro=m) for b in BATCHES for m in (2, 4)]
    slow = np.exp(rng.normal(0, 0.05, size=100))
    run = Run(
        rows,
        lambda i: 16.0,
        sd=0.1,
        jitter=lambda i: float(slow[i]),
        predicted=lambda r: r.samples_per_s * (1.1 if r.global_batch_size == 16 else 1.0),
        flags={"copus_early_steps": 0.0},
    ).go(100)
    assert returns(run.way) <= 1, run.way
    keys = [key_of(r.configuration) for r in run.kept]
    pairs = list(itertools.pairwise(keys))
    assert max(map(pairs.count, pairs), default=0) <= 1, keys


def test_a_batch_goes_back_on_evidence_that_is_new() -> None:
    """The noise scale falls for good; or the larger batch proves slow, once."""
    fell = Run(table(), lambda i: 40.0 if i < 12 else 1.0, sd=0.2, flags={"copus_early_steps": 0.0})
    way = fell.go(60).way
    assert max(way) > 8 and way[-1] < max(way), way
    slow = [replace(r, samples_per_s=20.0) if r.global_batch_size > 8 else r for r in table()]
    was = {r.global_batch_size: r.samples_per_s for r in table()}
    proved = Run(
        slow,
        lambda i: 40.0,
        sd=0.05,
        predicted=lambda r: was[r.global_batch_size],
        flags={"copus_early_steps": 0.0},
    ).go(60)
    assert proved.way[0] == proved.way[-1] == 8 and 2 <= len(proved.way) <= 5, proved.way


def test_a_change_that_has_no_gain_says_why() -> None:
    """Out of a configuration that cannot be measured: its goodput is not known."""
    blind = row(16, 30.0, micro=16, dp=1)
    run = Run([blind, row(16, 10.0, micro=8, dp=1)], lambda i: 16.0, sd=0.1)
    run.go(1)
    (decision,) = run.decisions
    assert decision.kind == "batch" and decision.reason.startswith("micro-batch 16 -> 8; ")
    assert "cannot be seen in one micro-batch" in decision.reason
    assert config_key("a", 1, 2) == "a 1 2"
