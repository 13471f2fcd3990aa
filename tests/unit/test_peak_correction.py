"""Peaks of memory are as sure as their parts, and what was measured corrects the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model.peak_correction import (
    AS_PREDICTED,
    KINDS,
    Memory,
    PeakCorrection,
    fit_probability,
    max_bytes,
)

GB = 1e9
SIZE = 80 * GB
PRIOR = np.array([0.12, 1.5 * GB])


def predicted(*parts: tuple[float, float]) -> Memory:
    """Of configurations with so many GB that stay, and so many that come and go."""
    stages = {kind: np.zeros((1, len(parts))) for kind in KINDS}
    stages["weights"] = np.array([[stay * GB for stay, _ in parts]])
    stages["activations"] = np.array([[moving * GB for _, moving in parts]])
    stages["context"] = np.full((1, len(parts)), 1.5 * GB)
    return Memory(
        stages=stages,
        peak_bytes=np.sum(list(stages.values()), axis=0)[0],
        worst_stage=np.zeros(len(parts), dtype=int),
        prior_sd=np.repeat(PRIOR[:, None], len(parts), axis=1),
    )


def by(correction: PeakCorrection, found: Memory) -> tuple[Any, Any]:
    """Corrected peaks, and their absolute uncertainty."""
    peak = found.peak_bytes + (correction.moving - 1) * found.moving_bytes + correction.fixed_bytes
    return peak, peak * correction.relative_sd(peak, found.moving_bytes, found.prior_sd)


def test_what_comes_and_goes_makes_a_peak_unsure() -> None:
    """Two of 60 GB; the second recomputes everything."""
    both = predicted((18.5, 40), (53.5, 5))
    sd = AS_PREDICTED.relative_sd(both.peak_bytes, both.moving_bytes, both.prior_sd)
    want = [math.hypot(0.03, 0.12 * moving / 60, 1.5 / 60) for moving in (40, 5)]
    assert sd == pytest.approx(want) and sd[0] > 2 * sd[1]


def test_a_measured_peak_never_makes_others_less_sure() -> None:
    """Unless it is far from what was thought: then little is known of the others."""
    both = predicted((18.5, 40), (53.5, 5))
    before = by(AS_PREDICTED, both)[1]
    found = PeakCorrection.of(both, [math.nan, both.peak_bytes[1]])
    assert (by(found, both)[1] <= before).all() and found.moving == pytest.approx(1, abs=1e-9)
    far = PeakCorrection.of(both, [math.nan, 1.6 * both.peak_bytes[1]])
    assert far.covariance is not None and found.covariance is not None
    assert far.covariance[0] > 4 * found.covariance[0]
    assert by(far, both)[0][1] == pytest.approx(1.6 * both.peak_bytes[1], rel=0.06)


def test_a_run_that_ran_bounds_the_peak() -> None:
    one = predicted((40, 48), (40, 20))
    found = PeakCorrection.of(one, [math.nan] * 2, at_most=[SIZE, math.inf])
    peak, sd = by(found, one)
    before = by(AS_PREDICTED, one)
    assert peak[0] < 0.97 * before[0][0] and peak[0] - sd[0] < SIZE
    assert peak[1] < before[0][1] and sd[0] < before[1][0]
    assert found.moving < 1


def test_a_run_that_failed_bounds_the_peak() -> None:
    one = predicted((40, 30), (40, 20))
    found = PeakCorrection.of(one, [math.nan] * 2, at_least=[SIZE, -math.inf])
    peak, before = by(found, one)[0], one.peak_bytes
    assert peak[0] > 1.04 * before[0] and peak[0] > 0.93 * SIZE and peak[1] > before[1]


def test_a_run_that_failed_far_below_its_limit_makes_predictions_wide() -> None:
    """However far off the prediction was, the next one is near the bound or above, larger the
    farther, and what recomputes all stays below that."""
    all_of_it = predicted((10, 30), (10, 3))
    before = 0.0
    for factor in (1.2, 1.5, 2.0, 3.0):
        lacked = factor * all_of_it.peak_bytes[0]
        found = PeakCorrection.of(all_of_it, [math.nan] * 2, at_least=[lacked, -math.inf])
        (kept, less), (sd, _) = by(found, all_of_it)
        assert kept > max(0.9 * lacked, before) and less < 0.7 * kept
        assert kept - 3 * sd < 1.3 * lacked, "no surer than it has to be"
        before = kept


def test_a_bound_far_from_a_measured_peak_makes_the_others_unsure() -> None:
    """One of 40 GB was measured as predicted, and a larger micro-batch lacked memory that it should
    have had: the corrected peak reaches the bound, and what was measured stays."""
    three = predicted((20, 20), (20, 40), (10, 60))
    found = PeakCorrection.of(
        three, [three.peak_bytes[0], math.nan, math.nan], at_least=[-math.inf, SIZE, -math.inf]
    )
    (first, second, third), (_, sd, doubt) = by(found, three)
    assert first == pytest.approx(three.peak_bytes[0], rel=0.1)
    assert second + 3 * sd > SIZE and third > three.peak_bytes[2]
    assert doubt > 0.04 * third, "more than of a peak of which much was measured"


def test_what_ran_still_fits_where_bounds_make_predictions_wide() -> None:
    two = predicted((10, 30), (10, 45))
    lacked = PeakCorrection.of(two, [math.nan] * 2, at_least=[SIZE, -math.inf])
    both = PeakCorrection.of(
        two, [math.nan] * 2, at_least=[SIZE, -math.inf], at_most=[math.inf, 1.2 * SIZE]
    )
    assert by(lacked, two)[0][1] > 1.2 * SIZE
    assert by(both, two)[0][1] < 1.2 * SIZE


def test_no_bound_says_nothing_of_a_small_model() -> None:
    small = predicted((0.05, 0.05))
    none = [-math.inf]
    assert PeakCorrection.of(small, [math.nan], at_most=[SIZE], at_least=none) == AS_PREDICTED


def test_a_bound_that_holds_anyway_says_nothing() -> None:
    """So that the controller's table stays as it was while its steps are timed."""
    some = predicted((20, 20), (20, 30))
    assert PeakCorrection.of(some, [math.nan] * 2, at_most=[SIZE, SIZE]) == AS_PREDICTED
    assert PeakCorrection.of(some, [math.nan] * 2, at_least=[-math.inf, 10 * GB]) == AS_PREDICTED
    assert PeakCorrection.of(predicted(), []) == AS_PREDICTED
    measured = [50 * GB, math.nan]
    alone = PeakCorrection.of(some, measured)
    assert PeakCorrection.of(some, measured, at_most=[math.inf, 2 * SIZE]) == alone


def test_peaks_and_bounds_agree_with_a_sum_over_all_values() -> None:
    """The posterior of both numbers, summed on a fine grid without any Gaussian."""
    some = predicted((30, 50), (30, 20), (40, 44))
    measured, most = [math.nan, 53 * GB, math.nan], [SIZE, math.inf, math.inf]
    least = [0.0, 0.0, 84 * GB]
    found = PeakCorrection.of(some, measured, at_most=most, at_least=least)
    a, b = np.meshgrid(np.linspace(-1, 1, 801), np.linspace(-12, 12, 801) * GB)
    peak = some.peak_bytes[:, None, None] + some.moving_bytes[:, None, None] * a + b
    logs = -((a / PRIOR[0]) ** 2) / 2 - (b / PRIOR[1]) ** 2 / 2
    logs -= ((peak[1] - 53 * GB) / (0.03 * 53 * GB)) ** 2 / 2
    erfc = np.vectorize(math.erfc)
    for i, limit, sign in ((0, SIZE, 1), (2, 84 * GB, -1)):
        z = sign * (limit - peak[i]) / (0.03 * some.peak_bytes[i])
        logs += np.log(np.maximum(erfc(-z / math.sqrt(2)) / 2, 1e-300))
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    assert found.moving == pytest.approx(1 + float((weights * a).sum()), abs=0.004)
    assert found.fixed_bytes == pytest.approx(float((weights * b).sum()), abs=0.03 * GB)
    sd = math.sqrt(float((weights * (a - found.moving + 1) ** 2).sum()))
    assert found.covariance is not None
    assert math.sqrt(found.covariance[0]) == pytest.approx(sd, rel=0.03)


def test_nobody_needs_less_than_nothing() -> None:
    some = predicted((5, 2), (6, 4))
    found = PeakCorrection.of(some, 0.3 * some.peak_bytes)
    assert found.fixed_bytes >= -1.5 * GB - 1 and found.moving < 0.9


def test_a_candidate_fits_with_the_probability_asked_for() -> None:
    sd = np.array([0.05, 0.1, 0.3])
    largest = SIZE / max_bytes(1.0, sd, 1.2816)
    assert fit_probability(largest, SIZE, sd) == pytest.approx([0.9] * 3, abs=1e-4)
