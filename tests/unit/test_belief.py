"""The belief about the critical batch size is that of its model, computed here by drawing it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from copus_ext.goodput import belief as b
from copus_ext.goodput.belief import Belief, Look, take_look
from tests.helpers.recorded import noise

END, LAW = 1e6, 200.0
LOOKS = (
    Look(samples=2e4, noise_scale=4.0, log_variance=0.15**2),
    Look(samples=9e4, noise_scale=9.0, log_variance=0.1**2),
)
NONE = Belief(law=LAW, end=END, multiplier=8.0)
SOME = dataclasses.replace(NONE, looks=LOOKS)


def drawn(points: Any, *, number: int = 60_000) -> tuple[Any, Any, Any]:
    """[number, points] ln B_crit, ln c, and the weights that LOOKS give to each draw.

    The exponent takes a random step over every small step back from the end.
    """
    rng = np.random.default_rng(0)
    back = np.linspace(0.0, -math.log(b.EARLIEST), 59)
    width = back[1] - back[0]
    slope = rng.normal(b.EXPONENT, b.EXPONENT_SD, number)
    log, wander, paths = math.log(LAW) + rng.normal(0.0, b.LEVEL_SD, number), 0.0, []
    for _ in back:
        paths.append(log)
        # A step of the walk and its integral, whose correlation is known.
        step = rng.normal(0.0, 1.0, (2, number))
        moved = b.WANDER_SD * math.sqrt(width) * step[0]
        inside = b.WANDER_SD * width**1.5 * (step[0] / 2 + step[1] / math.sqrt(12.0))
        log = log - slope * width + wander * width + inside
        wander = wander + moved
    grid = np.stack(paths, axis=1)

    def at(samples: float) -> Any:
        x = -math.log(max(samples / END, b.EARLIEST)) / width
        low = min(int(x), len(back) - 2)
        return grid[:, low] * (low + 1 - x) + grid[:, low + 1] * (x - low)

    log_c = rng.normal(math.log(8.0), b.MULTIPLIER_SD, number)
    weights = np.zeros(number)
    for look in LOOKS:
        off = math.log(look.noise_scale) - (at(look.samples) - log_c)
        weights -= off**2 / (2.0 * (look.log_variance + b.LOOK_SD**2))
    weights = np.exp(weights - weights.max())
    return np.stack([at(p) for p in points], axis=1), log_c, weights / weights.sum()


def test_the_closed_form_is_what_draws_of_the_model_give() -> None:
    points = (1e3, 2e4, 9e4, 4e5, 1e6)
    logs, log_c, weights = drawn(points)
    for one, w in ((NONE, np.full(len(logs), 1 / len(logs))), (SOME, weights)):
        mean, sd = one.log_critical_batch_size(np.array(points))
        seen = w @ logs
        scatter = np.sqrt(w @ (logs - seen) ** 2)
        effective = 1.0 / np.sum(w**2)
        assert effective > 500
        np.testing.assert_allclose(mean, seen, atol=0.02 + 4 * scatter.max() / math.sqrt(effective))
        np.testing.assert_allclose(sd, scatter, rtol=0.05)
    # ln c moves against ln phi, by what the looks have in common.
    moved = -(b.MULTIPLIER_SD**2) * float(SOME._solved[2].sum())
    assert math.log(8.0) + moved == pytest.approx(weights @ log_c, abs=0.08)


def test_what_a_batch_needs_is_the_mean_over_the_belief() -> None:
    sizes, at = (4, 64, 1024), np.array([1e3, 5e5])
    mean, sd = SOME.log_critical_batch_size(at)
    z = np.linspace(-9.0, 9.0, 20_001)
    density = np.exp(-z * z / 2.0) / np.exp(-z * z / 2.0).sum()
    exact = [
        [float(density @ np.log1p(size / np.exp(m + s * z))) for m, s in zip(mean, sd)]
        for size in sizes
    ]
    np.testing.assert_allclose(SOME.log_samples(sizes, at), exact, atol=2e-3)


def test_units_change_nothing() -> None:
    """All in samples of another length: the same belief in those."""
    looks = [
        dataclasses.replace(x, samples=4 * x.samples, noise_scale=4 * x.noise_scale) for x in LOOKS
    ]
    other = Belief(law=4 * LAW, end=4 * END, multiplier=8.0, looks=tuple(looks))
    for at in (1e3, 5e4, 1e6):
        ends = np.array(other.interval(4 * at)) / np.array(SOME.interval(at))
        np.testing.assert_allclose(ends, 4.0, rtol=1e-9)


def test_a_law_alone_is_published_and_doubtful_early() -> None:
    likely, low, high = NONE.interval(END)
    assert likely == pytest.approx(LAW) and high / likely == pytest.approx(4.0) == likely / low
    assert NONE.interval(END / 10)[0] == pytest.approx(LAW * 0.1**0.46)
    widths = [NONE.log_critical_batch_size([at])[1][0] for at in (1e3, 1e4, 1e5, 1e6)]
    assert widths == sorted(widths, reverse=True)
    # 5e6 tokens at 1.4e10 (arXiv 2505.13738).
    law = b.published_critical_batch_size(1.4e10 / 2048, 2048)
    assert law == pytest.approx(5e6 / 2048)
    # Small models here: about 8e3 tokens at the end of 2e6, a quarter of that at 5e5.
    small = [b.published_critical_batch_size(tokens, 1) for tokens in (2e6, 5e5)]
    assert small[0] == pytest.approx(8e3, rel=0.4) and small[0] == pytest.approx(4 * small[1])


def test_noise_moves_the_belief_as_far_as_it_is_sure() -> None:
    early = Look(samples=1e4, noise_scale=40.0, log_variance=0.01)
    seen = dataclasses.replace(NONE, looks=(early,))
    before, after = NONE.interval(1e4)[0], seen.interval(1e4)[0]
    assert before < after < 8 * 40.0
    vague = dataclasses.replace(early, log_variance=9.0)
    little = dataclasses.replace(NONE, looks=(vague,)).interval(1e4)[0]
    assert before < little < after
    assert seen.interval(END)[0] / NONE.interval(END)[0] < after / before, "the end is the law's"


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        ((), "about 200 samples (50 to 800), by the published law alone"),
        (
            (Look(samples=END, noise_scale=25.0, log_variance=0.01),),
            "and 8 times the measured noise scale, which agrees with it",
        ),
        (
            (Look(samples=END, noise_scale=250.0, log_variance=0.01),),
            "which is larger",
        ),
        (
            (Look(samples=END, noise_scale=2.5, log_variance=0.01),),
            "which is smaller",
        ),
    ],
)
def test_words(looks: tuple[Look, ...], words: str) -> None:
    assert words in dataclasses.replace(NONE, looks=looks).words(END)


def test_a_look_is_taken_once_it_tells_anything_new() -> None:
    known: dict[str, Any] = {"samples": 1000.0, "half_life": 100.0}
    first = take_look((), noise(64.0, spread=2.0), **known)
    assert first is not None and first.noise_scale == 64.0
    assert first.log_variance == pytest.approx((math.log(2.0) / 1.96) ** 2)
    again = {**known, "samples": 1199.0}
    assert take_look((first,), noise(64.0), **again) is None
    assert take_look((first,), noise(64.0), **{**known, "samples": 1200.0}) is not None
    assert take_look((), noise(64.0, steps=9.0), **known) is None
    assert take_look((), noise(None), **known) is None
    assert take_look((), noise(64.0, status="lower_bound_only"), **known) is None
    open_ends = {"phi_samples": 64.0, "low_samples": 16.0, "high_samples": None}
    open_above = dataclasses.replace(noise(64.0, status="lower_bound_only"), **open_ends)
    wide = take_look((), open_above, **known)
    assert wide is not None
    assert wide.log_variance == pytest.approx((math.log(4.0) / 1.96) ** 2)
