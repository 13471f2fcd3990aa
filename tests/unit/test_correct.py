"""Corrections go where the data point, and no further."""

from __future__ import annotations

import math

import numpy as np
import pytest

from copus_ext.cost_model.correct import Correction, Spread, correct

KEYS = [(t, p, b) for t in (1, 2, 4) for p in (1, 2) for b in (1, 2)]


def test_a_measured_row_returns_to_its_measurement_and_the_prior_stays_without_any() -> None:
    got = correct(KEYS, [KEYS[3]], [0.2])
    assert got.factor[3] == pytest.approx(math.exp(0.2), rel=0.01)
    assert got.relative_sd[3] < 0.011
    nothing, s = correct(KEYS, [], [], against=0), Spread()
    parts = (s.common, s.tensor, s.pipeline, s.pair, s.own)
    assert (nothing.factor == 1).all()
    assert nothing.relative_sd == pytest.approx(math.hypot(*parts))
    # What all have in common is no doubt about one against another.
    far = KEYS.index((4, 2, 2))
    assert nothing.against_sd[0] == 0.0
    assert nothing.against_sd[far] == pytest.approx(math.sqrt(2) * math.hypot(*parts[1:]))


def test_others_move_towards_the_common_factor_and_never_beyond_the_data() -> None:
    ratios = [0.2, 0.25, 0.3]
    got = correct(KEYS, KEYS[:3], ratios)
    others = np.log(got.factor[3:])
    assert (others > 0.05).all() and (others <= 0.3).all()
    prior = correct(KEYS, [], []).relative_sd
    assert (got.relative_sd <= prior + 1e-12).all()
    # The nearer relative is moved further.
    near, far = KEYS.index((1, 2, 2)), KEYS.index((4, 2, 2))
    one = correct(KEYS, [(1, 1, 1)], [0.2])
    assert one.factor[near] > one.factor[far] > 1


def test_the_order_of_arrival_does_not_matter_and_repeats_count() -> None:
    a = correct(KEYS, KEYS[:4], [0.1, -0.1, 0.2, 0.0])
    order = [2, 0, 3, 1]
    b = correct(KEYS, [KEYS[i] for i in order], [[0.1, -0.1, 0.2, 0.0][i] for i in order])
    np.testing.assert_allclose(a.factor, b.factor, rtol=1e-12)
    np.testing.assert_allclose(a.relative_sd, b.relative_sd, rtol=1e-9)
    once, twice = (correct(KEYS, KEYS[:1] * n, [0.1] * n).relative_sd[0] for n in (1, 2))
    assert twice < once


def test_two_counts_say_how_a_configuration_grows() -> None:
    """Measured 20 % slow at 2 micro-batches and as predicted at 8: in between in between."""
    key = KEYS[0]
    got = correct(
        [key] * 4,
        [key] * 2,
        [0.2, 0.0],
        counts=[2, 4, 8, 64],
        measured_counts=[2, 8],
    )
    ratio = np.log(got.factor)
    assert ratio[0] > ratio[1] > ratio[2] > ratio[3] > -0.3
    assert ratio[1] == pytest.approx(0.1, abs=0.03)
    assert got.relative_sd[3] > got.relative_sd[1], "far outside is less certain"


def test_a_noisy_measurement_counts_less() -> None:
    sure, unsure = (correct(KEYS, KEYS[:1], [0.3], noise=[sd]).factor[0] for sd in (0.01, 0.3))
    assert 1 < unsure < sure


def test_the_gap_is_that_of_the_joint_posterior() -> None:
    from copus_ext.cost_model import correct as module

    s, asked, known = Spread(), module._table(KEYS, 4.0), module._table(KEYS[2:4], 4.0)
    joint = module._kernel(asked, asked, s)
    cross = module._kernel(asked, known, s)
    inner = module._kernel(known, known, s) + np.diag([s.noise**2] * 2)
    joint -= cross @ np.linalg.inv(inner) @ cross.T
    for i in range(len(KEYS)):
        got = correct(KEYS, KEYS[2:4], [0.01, -0.01], against=i).against_sd
        gap = [joint[j, j] + joint[i, i] - 2 * joint[i, j] for j in range(len(KEYS))]
        np.testing.assert_allclose(got**2, gap, atol=1e-9)
    more = correct([*KEYS, KEYS[0]], KEYS[:2], [0.3, 0.1], counts=[4.0] * 12 + [16.0], against=0)
    assert more.against_sd[-1] < 0.05 < more.against_sd[4], "the same with more micro-batches"


def test_further_columns_tell_configurations_apart() -> None:
    got = correct([(1, 2, 1, 1), (1, 2, 1, 2)], [(1, 2, 1, 2)], [0.3])
    assert 1 < got.factor[0] < got.factor[1]


@pytest.mark.parametrize("factor", [1 / 3, 2, 5])
def test_a_machine_of_another_speed_throughout_favours_no_layout(factor: float) -> None:
    got = correct(KEYS, KEYS[:1], [math.log(factor)])
    assert got.factor == pytest.approx(factor, rel=0.05)
    # What was known of one layout against another is still known, and no more.
    assert (got.relative_sd[4:] > 0.1).all() and (got.relative_sd < 0.2).all()


def test_a_machine_that_changed_since_it_was_profiled_favours_no_layout() -> None:
    then = np.random.default_rng(1).normal(0.0, 0.06, len(KEYS))
    earlier = [False] + [True] * len(KEYS)

    def seen(shift: float, earlier: list[bool] | None = None) -> Correction:
        ratios = [then[0] + shift, *then]
        return correct(KEYS, [KEYS[0], *KEYS], ratios, against=0, earlier=earlier)

    for shift in (0.25, -0.1):
        got = seen(shift, earlier)
        assert got.factor[0] == pytest.approx(math.exp(then[0] + shift), rel=0.02)
        over = np.log(got.factor / got.factor[0])
        np.testing.assert_allclose(over, then - then[0], atol=0.02)
        assert (got.against_sd < 0.03).all()
        as_of_now = np.log(seen(shift).factor)
        assert np.ptp(as_of_now - np.log(got.factor)) > 0.02, "what it would be without"


def test_a_profile_counts_as_of_now_until_something_is_measured_now() -> None:
    ratios = [0.3, 0.1, 0.2]
    plain, old = (correct(KEYS, KEYS[:3], ratios, earlier=e) for e in (None, [True] * 3))
    np.testing.assert_array_equal(plain.factor, old.factor)
    np.testing.assert_array_equal(plain.relative_sd, old.relative_sd)
