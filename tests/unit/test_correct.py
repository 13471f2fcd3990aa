"""Corrections go where the data point, and no further."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from copus_ext.cost_model import correct as module
from copus_ext.cost_model.correct import Correction, PartSpread, Spread, Steps, most_informative
from copus_ext.cost_model.step import shown_s

KEYS = [(t, p, b) for t in (1, 2, 4) for p in (1, 2) for b in (1, 2)]


def correct(
    keys: Any,
    measured: Any,
    log_ratios: Any,
    *,
    counts: Any = 4.0,
    measured_counts: Any = 4.0,
    **how: Any,
) -> Correction:
    """Of steps that are all computation."""
    known = Steps.of(measured, measured_counts)
    return module.correct(Steps.of(keys, counts), known, log_ratios, **how)


def test_a_measured_row_returns_to_its_measurement_and_the_prior_stays_without_any() -> None:
    got = correct(KEYS, [KEYS[3]], [0.2])
    assert got.factor[3] == pytest.approx(math.exp(0.2), rel=0.01)
    assert got.relative_sd[3] < 0.011
    nothing, s = correct(KEYS, [], [], against=0), Spread()
    parts = (module._UNSEEN, s.tensor, s.pipeline, s.pair, s.own, PartSpread().compute)
    assert (nothing.factor == 1).all()
    prior = [math.hypot(*parts, s.piped if pp > 1 else 0.0) for _, pp, _ in KEYS]
    assert nothing.relative_sd == pytest.approx(prior)
    # What all have in common is no doubt about one against another.
    far = KEYS.index((4, 2, 2))
    assert nothing.against_sd[0] == 0.0
    gap = math.hypot(math.sqrt(2) * math.hypot(*parts[1:-1]), s.piped)
    assert nothing.against_sd[far] == pytest.approx(module._TAILS * gap)


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
    s, asked, known = Spread(), Steps.of(KEYS), Steps.of(KEYS[2:4])
    parts = PartSpread().compute ** 2 + module._CONSTANT**2
    joint = module._kernel(asked, asked, s) + parts
    cross = module._kernel(asked, known, s) + parts
    inner = module._kernel(known, known, s) + parts + np.diag([s.noise**2] * 2)
    joint -= cross @ np.linalg.inv(inner) @ cross.T
    for i in range(len(KEYS)):
        got = correct(KEYS, KEYS[2:4], [0.01, -0.01], against=i).against_sd
        gap = [joint[j, j] + joint[i, i] - 2 * joint[i, j] for j in range(len(KEYS))]
        np.testing.assert_allclose((got / module._TAILS) ** 2, gap, atol=5e-6)
    more = correct([*KEYS, KEYS[0]], KEYS[:2], [0.3, 0.1], counts=[4.0] * 12 + [16.0], against=0)
    assert more.against_sd[-1] < 0.05 < more.against_sd[4], "the same with more micro-batches"


def mixed(shares: dict[str, list[float]]) -> Steps:
    """Configurations that are no kin, with these seconds of some parts."""
    number = len(next(iter(shares.values())))
    return Steps.of([(2**i, 3**i, 1) for i in range(number)], 4.0, shares)


def test_two_timings_find_the_part_that_is_slow() -> None:
    """Gradients take four times as long as predicted, all else what was predicted."""
    shares = {"compute": [1.0, 1.0, 1.0, 1.0], "dp": [0.5, 0.0, 0.25, 0.1], "pp": [0, 0.5, 0, 0.2]}
    steps = mixed(shares)
    truth = np.log((steps.step_s + 3 * np.array(shares["dp"])) / steps.step_s)
    got = module.correct(steps, steps.take([0, 1]), truth[:2])
    assert 2.4 < got.part_factors["dp"] < 4.1, "the prior holds it back a little"
    assert 0.5 < got.part_factors["pp"] < 1.1
    plain = replace(steps, seconds=mixed({"compute": [1.0] * 4}).seconds)
    without = module.correct(plain, plain.take([0, 1]), truth[:2])
    for i in (2, 3):
        error = abs(math.log(got.factor[i]) - truth[i])
        assert error < 0.06 and error < abs(math.log(without.factor[i]) - truth[i]) / 2


def test_the_measured_end_of_a_step_tells_what_every_batch_has_of_it() -> None:
    """The optimizer takes a quarter of what was predicted, computation half again as much, and one
    configuration was timed: its whole step looks as predicted."""
    counts = np.array([1.0, 2.0, 8.0])
    parts = {"compute": 1.0 * counts, "optimizer": np.full(3, 0.7), "host": np.full(3, 0.1)}
    steps = Steps.of([(1, 1, 1)] * 3, counts, parts)
    truth = np.log((1.5 * counts + 0.2) / steps.step_s)
    blind, seen = (
        module.correct(steps, steps.take([0]), truth[:1], ends=[end], against=0)
        for end in (None, 0.2 / 1.7)
    )
    for i in (1, 2):
        assert abs(math.log(seen.factor[i] / seen.factor[0]) - truth[i] + truth[0]) < 0.06
        assert math.log(blind.factor[i] / blind.factor[0]) < truth[i] - truth[0] - 0.1
    assert seen.factor[0] == pytest.approx(math.exp(truth[0]), rel=0.02)
    # One that nobody measured changes nothing.
    plain = module.correct(steps, steps.take([0]), truth[:1], against=0)
    assert (plain.factor == blind.factor).all()


def test_reductions_and_weights_come_out_of_hiding() -> None:
    """The factor on their seconds acts as the cost model has it."""
    rng = np.random.default_rng(0)
    hiding = rng.uniform(0.0, 1.0, (2, 5, 40))
    hiding[:, 0] /= 4
    hiding[0, 3:] = hiding[0, 1:3]
    hiding[1, :, :5] = 0.0
    exposed, other = shown_s(hiding.swapaxes(0, 1)), 0.1
    parts = {"compute": np.full(40, 4.0), "dp": exposed.sum(axis=0) + other}
    steps = Steps.of([(1, 1, i) for i in range(40)], 4.0, parts, hiding)
    for factor in (0.3, 1.0, 1.5, 4.0):
        theta = np.zeros(len(PartSpread.__dataclass_fields__) + 1)
        theta[list(PartSpread.__dataclass_fields__).index("dp")] = math.log(factor)
        slower = hiding.copy()
        slower[:, [0, 1, 3]] *= factor
        want = 4.0 + other * factor + shown_s(slower.swapaxes(0, 1)).sum(axis=0)
        got = module._Parts(constant_s=0.0).log_factors(steps, theta) + np.log(steps.step_s)
        np.testing.assert_allclose(np.exp(got), want)


def test_slow_launches_are_told_from_slow_computation() -> None:
    """Small micro-batches wait for kernels, large ones compute. Kernels start slowly here."""
    work, launch = np.array([1.0, 4.0, 16.0, 1.0]), np.array([2.0, 2.0, 2.0, 4.0])
    keys = [(1, 1, 1), (1, 1, 4), (1, 1, 16), (2, 1, 1)]
    steps = Steps.of(keys, 4.0, {"compute": work + launch}, launch_s=launch)
    np.testing.assert_allclose(steps.step_s, work + launch)
    truth = np.log((work + 3 * launch) / (work + launch))
    got = module.correct(steps, steps.take([0, 2]), truth[[0, 2]])
    assert got.part_factors["launch"] > 1.7 and got.part_factors["compute"] < 1.1
    assert np.log(got.factor)[[1, 3]] == pytest.approx(truth[[1, 3]], abs=0.25)
    assert got.factor[3] > got.factor[1] > got.factor[2]


def test_launches_join_the_work_as_the_cost_model_joins_them() -> None:
    q, work, launch = module._SHARPNESS, np.array([1.0, 1.0, 1.0]), np.array([0.1, 0.5, 2.0])
    total = (work**q + launch**q) ** (1 / q)
    steps = Steps.of(KEYS[:3], 4.0, {"compute": total}, launch_s=total * launch**q / total**q)
    parts = module._Parts(constant_s=0.0)
    theta = np.zeros(len(parts.sd))
    theta[module._COMPUTE], theta[module._LAUNCH] = math.log(1.2), math.log(3.0)
    expected = ((1.2 * work) ** q + (3.0 * launch) ** q) ** (1 / q)
    np.testing.assert_allclose(parts.log_factors(steps, theta), np.log(expected / total))
    # The doubt is of what longer launches would make of it, which the slope does not show.
    spread, slope = (
        x[:, module._LAUNCH]
        for x in (parts.spread(steps, 0 * theta), parts.slopes(steps, 0 * theta))
    )
    spread = spread / PartSpread().launch
    assert spread[1] > 1.5 * slope[1] and (np.diff(spread) > 0).all()
    assert spread[2] == pytest.approx(slope[2], rel=0.3), "where launches rule, both say so"


def test_a_constant_time_of_every_step_is_found() -> None:
    steps = mixed({"compute": [1.0, 8.0, 2.0]})
    truth = np.log(1 + 0.1 / steps.step_s)
    got = module.correct(steps, steps.take([0, 1]), truth[:2])
    assert math.log(got.factor[2]) == pytest.approx(truth[2], abs=0.02)


def test_parts_that_nothing_was_measured_of_keep_their_doubt() -> None:
    steps = mixed({"compute": [1.0, 1.0, 1.0], "dp": [0.0, 0.0, 1.0], "tp": [0.0, 1.0, 0.0]})
    prior = module.correct(steps, steps.take([]), []).relative_sd
    assert prior[2] > prior[1] > prior[0]
    after = module.correct(steps, steps.take([0, 1]), [0.0, 0.0]).relative_sd
    assert after[0] < 0.02 and after[1] < 0.02
    assert after[2] > 0.8 * PartSpread().dp / 2, "half of the step is gradients"


def test_the_likeliest_factors_are_a_minimum() -> None:
    rng = np.random.default_rng(0)
    names = ("compute", "bubble", "tp", "pp", "dp", "optimizer")
    steps = mixed({name: rng.uniform(0.05, 1.0, 6).tolist() for name in names})
    # Reductions and weights of which much, little and nothing is hidden.
    hiding = rng.uniform(0.1, 1.0, (6, 5, 2))
    hiding[:, 0] /= 8
    steps = replace(steps, hiding=hiding)
    ratios = rng.normal(0.5, 0.4, 6)
    parts = module._Parts(constant_s=0.03 * float(np.median(steps.step_s)))
    apart = module._kernel(steps, steps, Spread()) + 1e-4 * np.eye(6)
    theta = parts.likeliest(steps, ratios, apart)

    def loss(at: Any) -> float:
        left = ratios - parts.log_factors(steps, at)
        return float(left @ np.linalg.solve(apart, left) + np.sum((at / parts.sd) ** 2))

    for _ in range(50):
        assert loss(theta + rng.normal(0, 0.03, len(theta))) > loss(theta) - 1e-6
    step = 1e-6
    slopes = [
        (parts.log_factors(steps, theta + step * e) - parts.log_factors(steps, theta - step * e))
        / (2 * step)
        for e in np.eye(len(theta))
    ]
    np.testing.assert_allclose(parts.slopes(steps, theta), np.array(slopes).T, atol=1e-7)


def test_the_two_to_time_say_most() -> None:
    dp, pp = [0.0, 0.6, 0.1, 0.3, 0.2], [0.0, 0.0, 0.5, 0.1, 0.2]
    steps = mixed({"compute": [1.0] * 5, "dp": dp, "pp": pp})

    def doubt(known: list[int]) -> float:
        got = module.correct(steps, steps.take(known), [0.0] * len(known))
        return float(np.sum(got.relative_sd**2))

    def chosen(number: int, **how: Any) -> list[int]:
        return most_informative(steps, number, samples=steps.step_s, **how)

    assert doubt(chosen(1)) == pytest.approx(min(doubt([i]) for i in range(5)), rel=0.02)
    first, second = chosen(2)
    pairs = {(i, j): doubt([i, j]) for i in range(5) for j in range(i)}
    assert doubt([first, second]) <= 1.1 * min(pairs.values())
    assert {first, second} == {1, 2}, "one with most gradients, one with most messages"
    assert chosen(1, known=steps.take([first])) == [second]
    assert sorted(chosen(9)) == [0, 1, 2, 3, 4]
    slow = np.where(np.arange(5) == 1, 0.05, 1.0) * steps.step_s
    assert 1 not in most_informative(steps, 2, samples=slow), "nobody would run it"


def test_further_columns_tell_configurations_apart() -> None:
    got = correct([(1, 2, 1, 1), (1, 2, 1, 2)], [(1, 2, 1, 2)], [0.3])
    assert 1 < got.factor[0] < got.factor[1]


def test_a_slow_link_says_no_more_of_computation_than_of_itself() -> None:
    """One that mostly waits for a link takes five times as long as predicted."""
    steps = mixed({"compute": [1.0, 0.2], "dp": [0, 0.8]})
    got = module.correct(steps, steps.take([1]), [math.log(5.0)])
    assert 3 < got.factor[0] < 5 and got.relative_sd[0] < 0.65


@pytest.mark.parametrize("factor", [1 / 3, 2, 5])
def test_a_machine_that_computes_at_another_speed_favours_no_layout(factor: float) -> None:
    got = correct(KEYS, KEYS[:1], [math.log(factor)])
    assert got.factor == pytest.approx(factor, rel=0.05)
    # What was known of one layout against another is still known, and no more.
    s = Spread()
    apart = math.sqrt(2) * math.hypot(s.tensor, s.pair, s.own)
    assert (got.relative_sd[4:] > 0.95 * apart).all() and (got.relative_sd < 1.5 * apart).all()


@pytest.mark.parametrize("slower", [1.2, 2.0])
def test_a_machine_that_computes_slower_says_half_as_much_of_its_links(slower: float) -> None:
    """Two that mostly compute take twice as long as predicted. A third, which mostly waits for a
    link, takes 1.2 times as long if the link is as fast as predicted, or else twice."""
    steps = mixed({"compute": [1.0, 1.0, 0.2], "dp": [0.05, 0, 0.8], "pp": [0, 0.05, 0]})
    computes = np.log((steps.step_s + steps.seconds[:, 0]) / steps.step_s)
    got = module.correct(steps, steps.take([0, 1]), computes[:2])
    error = abs(math.log(got.factor[2] / slower))
    assert error < 0.3 and error < got.relative_sd[2]


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
