"""A decision depends on the situation alone, and has the properties that are claimed of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from copus_ext.gns.observer import NoiseScale
from copus_ext.goodput import trial
from copus_ext.goodput.decide import decide
from copus_ext.goodput.inputs import ConfigThroughput, Decision, DecisionInputs
from copus_ext.goodput.policies import POLICIES, scheduled_batch, snap
from tests.helpers import recorded
from tests.helpers.recorded import row, shipped_rules

GRID = (8, 16, 32, 64, 128, 256, 512)


def saturating(half: float = 24.0) -> list[ConfigThroughput]:
    """Throughput in proportion to B/(B + half): twice the batch is never twice as slow."""
    return [row(b, 100.0 * b / (b + half)) for b in GRID]


def noise(phi: float | None, *, sd: float = 0.0, **more: Any) -> NoiseScale:
    return recorded.noise(phi, spread=math.exp(1.96 * sd), **more)


def situation(
    batch: int = 16,
    phi: float | None = 64.0,
    *,
    rows: list[ConfigThroughput] | None = None,
    flags: dict[str, Any] | None = None,
    rules: dict[str, Any] | None = None,
    measured: NoiseScale | None = None,
    **more: Any,
) -> DecisionInputs:
    """Saturating throughput on a grid, decided as `--copus` with these flags does; `rules` are
    those fields that no flag can set so."""
    table = rows if rows is not None else saturating()
    current = next(i for i, r in enumerate(table) if r.global_batch_size == batch)
    values: dict[str, Any] = {
        "iteration": 1000,
        "consumed_samples": 500_000,
        "total_samples": 1_000_000,
        "half_life_samples": 1000.0,
        "elapsed_s": 50_000.0,
        "relayout_cost_s": 60.0,
        **more,
    }
    given = {"copus_noise_scale_multiplier": 4.0, **(flags or {})}
    if {"copus_policy", "copus_objective"} & {*given}:
        given = dict(flags or {})  # these have a multiplier of their own
    return DecisionInputs(
        rules=shipped_rules(flags=given, **(rules or {})),
        noise=measured or noise(phi),
        rows=tuple(table),
        current=current,
        **values,
    )


def follow(s: DecisionInputs, number: int = 30) -> list[int]:
    """Batches when every decision is applied and nothing else changes."""
    sizes = [s.now.global_batch_size]
    for _ in range(number):
        to = decide(s).to
        s = dataclasses.replace(s, current=s.rows.index(to))
        sizes.append(to.global_batch_size)
    return sizes


@pytest.mark.parametrize(("phi", "best"), [(8, 32), (16, 32), (32, 64), (64, 64), (256, 128)])
def test_goodput_leads_to_the_root_of_critical_batch_and_saturation(phi: int, best: int) -> None:
    """The nearest of the grid to sqrt(24 x 4 phi), four times the batch at most."""
    assert follow(situation(8, phi))[-1] == best
    sizes = {b: abs(math.log(b / math.sqrt(24 * 4 * phi))) for b in GRID}
    assert min(sizes, key=lambda b: sizes[b]) == best
    late: dict[str, Any] = {"consumed_samples": 5_000_000, "total_samples": 10_000_000}
    assert follow(situation(16, 4000.0, **late), 3) == [16, 64, 256, 512]
    assert decide(situation(16, 4000.0, **late)).target_batch == 512
    down = follow(situation(512, phi))
    assert down[1] == down[-1] <= 2 * best, "any way down at once"


@pytest.mark.parametrize("known", [True, False])
def test_early_in_a_run_the_critical_batch_is_small(known: bool) -> None:
    """At most the samples over 100 steps, whatever was measured; growth waits for the noise."""
    measured = noise(4000.0) if known else noise(None)
    for consumed, best in ((1_000, 16), (6_000, 32), (30_000, 64)):
        long = {"measured": measured, "rules": {"seq_length": 2048}}
        s = situation(512, consumed_samples=consumed, total_samples=33_000, **long)
        assert s.critical_batch_size == consumed / 100
        assert decide(s).critical_batch_size_is_bound
        assert math.isclose(best, math.sqrt(24 * consumed / 100), rel_tol=0.42)
        assert decide(s).to.global_batch_size == best
    s = situation(8, measured=measured, consumed_samples=30_000)
    decision = decide(s)
    assert decision.to.global_batch_size == (32 if known else 8), "4 times at most"
    assert known or "not known yet" in decision.reason
    assert situation(8, 4.0, consumed_samples=30_000).critical_batch_size == 16.0
    few = noise(4.0, steps=3.0)
    unsure = situation(8, measured=few, flags={"copus_policy": "copus"}, consumed_samples=30_000)
    assert not unsure.is_critical_batch_size_bound, "a published policy knows no bound"
    published = situation(8, 4000.0, flags={"copus_policy": "copus"}, consumed_samples=30_000)
    assert published.critical_batch_size == 8000.0


def test_of_short_samples_a_law_of_tokens_bounds_the_critical_batch() -> None:
    def bound(samples: int, seq_length: int | None) -> float:
        run: dict[str, Any] = {"consumed_samples": samples, "total_samples": 33_000}
        return situation(8, rules={"seq_length": seq_length}, **run).max_critical_batch_size

    assert bound(1_000, None) == bound(1_000, 4096) == 10.0
    assert bound(2_000, 64) == pytest.approx(11.5 * (2_000 * 64) ** 0.47 / 64)
    assert bound(30_000, 64) == 300.0, "later the steps say more"
    assert bound(10, 64) == bound(900, 64), "of the first 3 %"
    run = {"consumed_samples": 2_000, "total_samples": 33_000, "rules": {"seq_length": 64}}
    s = situation(512, measured=noise(640.0), **run)
    assert "= half of a published law at 128000 tokens" in decide(s).reason


def test_a_decision_says_what_its_critical_batch_size_comes_from() -> None:
    words = "critical batch size 256.0 = 4 x noise scale 64.0"
    assert words in decide(situation(16, 64.0)).reason
    early = situation(16, 640.0, consumed_samples=30_000)
    assert "critical batch size 300.0 = 30000 samples / 100" in decide(early).reason
    first = situation(16, 640.0, consumed_samples=10, total_samples=1_000_000)
    assert "critical batch size 300.0 = 30000 samples / 100" in decide(first).reason


@pytest.mark.parametrize("phi", [4, 8, 32, 128])
def test_under_the_papers_objective_flat_throughput_leads_to_the_critical_batch(phi: int) -> None:
    flat = [row(b, 10.0) for b in GRID]
    s = situation(8, phi, rows=flat, flags={"copus_objective": "copus"})
    assert follow(s)[-1] == 2 * phi == s.critical_batch_size


def test_a_decision_is_the_same_from_its_json() -> None:
    for batch, phi, policy in itertools.product((8, 64), (3.0, 64.0, None), POLICIES):
        rules = {"policy": policy, "schedule": ((0, 8), (100, 16))}
        s = situation(batch, phi, rules=rules, measured=noise(phi, sd=0.3) if phi else None)
        assert s.to_json()["rules"]["noise_scale_multiplier"] == 4.0
        again = DecisionInputs.from_json(json.loads(json.dumps(s.to_json(), allow_nan=False)))
        assert again == s
        first, second = decide(s), decide(again)
        assert first == second
        text = json.dumps(first.to_json(), allow_nan=False)
        assert Decision.from_json(json.loads(text)) == first


def test_units_change_nothing_and_only_rows_of_the_table_are_chosen() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        speeds = rng.uniform(5, 20, len(GRID))
        rows = [row(b, float(v), sd=0.01) for b, v in zip(GRID, speeds)]
        s = situation(16, float(np.exp(rng.uniform(1, 6))), rows=rows)
        faster = [dataclasses.replace(r, samples_per_s=60 * r.samples_per_s) for r in rows]
        other = dataclasses.replace(s, rows=tuple(faster), elapsed_s=s.elapsed_s / 60)
        one, two = decide(s), decide(other)
        assert one.to in rows and one.to.global_batch_size == two.to.global_batch_size
        assert [c.row.global_batch_size for c in one.candidates] == [
            c.row.global_batch_size for c in two.candidates
        ]


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ({}, {}),
        ({}, {"consumed_samples": 4_000, "phi": None}),
        ({}, {"last_change_samples": 499_500}),
        ({}, {"hold_growth_until_samples": 500_001}),
        ({"copus_policy": "doubling"}, {"consumed_samples": 130_000}),
        ({}, {"annealing_from": 16, "consumed_samples": 990_000, "anneal_share": 0.1}),
    ],
)
def test_samples_that_became_longer_change_no_decision(
    flags: dict[str, Any], more: dict[str, Any]
) -> None:
    """Positions count shorter samples than batches do."""
    share = {"anneal_share": more.pop("anneal_share")} if "anneal_share" in more else {}
    s = situation(flags=flags, rules=share, **more)
    names = ("consumed_samples", "total_samples", "last_change_samples")
    counted = {name: getattr(s, name) for name in (*names, "hold_growth_until_samples")}
    rules = dataclasses.replace(s.rules, length_ratio=4)
    longer = {name: value and 4 * value for name, value in counted.items()}
    found, told = decide(dataclasses.replace(s, rules=rules, **longer)), decide(s)
    assert found.to == told.to and found.kind == told.kind
    assert found.critical_batch_size == told.critical_batch_size and found.gain == told.gain


def test_an_unsure_gain_waits() -> None:
    """Goodput from batch 32 to 64 is 5.1 % at a critical batch size of 120."""
    sure = situation(32, measured=noise(30.0, sd=0.1))
    assert decide(sure).to.global_batch_size == 64
    wide = noise(30.0, sd=1.5)
    guessed = [dataclasses.replace(r, relative_sd=0.15) for r in saturating()]
    for unsure in (
        situation(32, measured=wide),
        situation(32, measured=dataclasses.replace(wide, low_samples=0.0)),
        situation(32, 30.0, rows=guessed),
    ):
        assert decide(unsure).kind == "stay"
    # A lower bound allows growth.
    bound = noise(100.0, status="lower_bound_only")
    assert decide(situation(16, measured=bound)).to.global_batch_size == 64


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"paused": True}, "paused"),
        ({"skipped_steps": 6}, "6 of the last 100 steps were skipped"),
        ({"consumed_samples": 1_000_000}, "the run is over"),
        ({"in_ramp": True}, "follows the last growth"),
        ({"critical_batch_size_when_shrunk": 200.0}, "the batch shrank"),
        ({"hold_growth_until_samples": 600_000}, "until sample 600000"),
        ({"measured": noise(64.0, steps=19.0)}, "not known yet: 19 of 20 measurements"),
        ({"phi": None}, "not known yet"),
    ],
)
def test_what_keeps_a_batch(more: dict[str, Any], words: str) -> None:
    assert decide(situation(16)).kind == "batch"
    decision = decide(situation(16, **more))
    assert decision.kind == "stay" and words in decision.reason


def test_an_early_noise_scale_holds_growth_back_but_shrinks_nothing() -> None:
    """In the first 3 % of the run, while the learning rate warms up: decided by the bound of 300
    samples, as far as the noise scale agrees."""
    rules = {"early_steps": 100.0, "first_batch": 16}
    early = {"in_warmup": True, "iteration": 200, "consumed_samples": 3_000, "rules": rules}
    decision = decide(situation(16, **early))
    assert decision.kind == "batch" and decision.to.global_batch_size > 16
    kept = decide(situation(16, phi=2.0, **early))
    assert kept.kind == "stay" and "the noise scale asks for no more" in kept.reason
    unknown = decide(situation(16, measured=noise(64.0, steps=19.0), **early))
    assert unknown.kind == "stay" and "not known yet" in unknown.reason


def test_a_batch_without_another_names_the_limits_of_the_flags() -> None:
    alone = decide(situation(16, rows=[row(16, 10.0)], rules={"grid": (8, 16)}))
    assert (alone.kind, "from 8 to 16, as the flags allow" in alone.reason) == ("stay", True)


@pytest.mark.parametrize("phi", [None, 64.0])
def test_where_the_noise_cannot_be_seen_is_no_place_to_be(phi: float | None) -> None:
    blind, slow = row(16, 30.0, micro=16, dp=1), row(16, 10.0, micro=8, dp=1)
    rows = [slow, blind, row(32, 40.0, micro=32, dp=1)]
    assert (
        blind.noise_unmeasurable
        and not slow.noise_unmeasurable
        and not row(16, 1.0, micro=16).noise_unmeasurable
    )
    stays = decide(situation(16, phi, rows=rows))
    assert stays.to == slow, stays.reason
    leaves = decide(situation(16, phi, rows=[blind, slow, rows[2]]))
    assert (leaves.kind, leaves.to) == ("batch", slow)
    # Whoever needs no noise scale takes what is fastest.
    assert decide(situation(16, phi, rows=rows, flags={"copus_policy": "static"})).to == blind
    alone = decide(situation(16, phi, rows=[blind]))
    assert alone.kind == "stay" and "cannot be seen" in alone.reason


def test_the_micro_batch_follows_throughput_without_a_noise_scale() -> None:
    rows = [row(16, 10.0, sd=0.01), row(16, 12.0, micro=8, sd=0.01), row(32, 20.0, sd=0.01)]
    decision = decide(situation(16, None, rows=rows))
    assert (decision.kind, decision.to.micro_batch_size) == ("batch", 8)
    assert decision.to.global_batch_size == 16
    soon = situation(16, None, rows=rows, steps_since_change=9)
    assert decide(soon).kind == "stay"
    close = [row(16, 10.0, sd=0.01), row(16, 10.2, micro=8, sd=0.01)]
    assert decide(situation(16, None, rows=close)).kind == "stay"


def test_a_micro_batch_that_nobody_timed_is_tried() -> None:
    """One that is predicted to be faster needs no certainty; once it was timed it does."""
    now = row(16, 10.0, sd=0.01)
    untimed = dataclasses.replace(row(16, 10.2, micro=8, sd=0.15), source="predicted")
    s = situation(16, None, rows=[now, untimed], steps_since_change=10)
    assert decide(s).to == untimed and "worth a trial" in decide(s).reason
    # One that is predicted to be slower, too, as long as its doubt makes it worth the ten steps.
    worse, worst = (dataclasses.replace(untimed, samples_per_s=v) for v in (8.5, 6.0))
    assert decide(dataclasses.replace(s, rows=(now, worse))).to == worse
    far = dataclasses.replace(untimed, configuration=row(16, micro=16).configuration)
    other = dataclasses.replace(untimed, configuration=row(16, micro=8, dp=1).configuration)
    timed = dataclasses.replace(untimed, source="measured")
    for stays in (
        dataclasses.replace(s, steps_since_change=9),
        dataclasses.replace(s, rows=(now, worst)),
        dataclasses.replace(s, rows=(now, dataclasses.replace(worse, relative_sd=0.02))),
        dataclasses.replace(s, rows=(now, far)),
        dataclasses.replace(s, rows=(now, other)),
        dataclasses.replace(s, rows=(now, timed)),
        dataclasses.replace(s, consumed_samples=s.total_samples - 99 * 16),
        dataclasses.replace(s, rules=dataclasses.replace(s.rules, policy="static")),
    ):
        assert decide(stays).kind == "stay"
    # The best of all is too far to be tried, and another one is on the way.
    fastest = dataclasses.replace(far, samples_per_s=11.0)
    assert decide(dataclasses.replace(s, rows=(now, untimed, fastest))).to == untimed
    # It was slower than it seemed: back, as soon as that is known.
    slower = dataclasses.replace(untimed, samples_per_s=9.5, relative_sd=0.01, source="measured")
    tried = dataclasses.replace(s, rows=(now, slower), current=1)
    assert decide(tried).to == now
    # One that seems faster still, but is too far to be taken, does not hide the way back.
    small = dataclasses.replace(row(16, 9.0, micro=2), source="measured")
    assert decide(dataclasses.replace(tried, rows=(now, small, fastest))).to == now


def test_a_batch_that_grew_shrinks_only_on_better_evidence() -> None:
    assert decide(situation(256, 8.0)).to.global_batch_size == 32
    assert decide(situation(256, 8.0, flags={"copus_allow_shrink": False})).kind == "stay"
    grown = situation(256, 8.0, critical_batch_size_when_grown=127.0)
    assert decide(grown).kind == "stay" and "the batch grew" in decide(grown).reason
    grown = dataclasses.replace(grown, critical_batch_size_when_grown=128.0)
    assert decide(grown).to.global_batch_size == 32
    for known, factor in ((0.1, math.exp(0.55)), (0.25, math.exp(5.5 / 4)), (0.4, math.exp(2.2))):
        better = dataclasses.replace(grown, noise=noise(8.0, sd=known))
        for share, kind in ((0.99, "stay"), (1.01, "batch")):
            then = share * factor * 32
            s = dataclasses.replace(better, critical_batch_size_when_grown=then)
            assert decide(s).kind == kind, (known, share)


def test_a_batch_that_nobody_timed_is_tried() -> None:
    """Its speed needs no certainty, its critical batch size does; once it was timed, both do."""
    now = row(16, 10.0, sd=0.01)
    untimed = dataclasses.replace(row(32, 12.0, sd=0.2), source="predicted")
    s = situation(16, rows=[now, untimed])
    assert decide(s).to == untimed
    unsure = dataclasses.replace(s, noise=noise(64.0, sd=2.0))
    timed = dataclasses.replace(untimed, source="measured")
    further = dataclasses.replace(untimed, configuration=row(64).configuration)
    wider = dataclasses.replace(untimed, configuration=row(32, micro=16).configuration)
    other = dataclasses.replace(untimed, configuration=row(32, dp=1).configuration)
    paper = dataclasses.replace(s.rules, switch_rule="paper")
    for stays in (
        unsure,
        *(dataclasses.replace(s, rows=(now, x)) for x in (timed, further, wider, other)),
        dataclasses.replace(s, consumed_samples=s.total_samples - 99 * 32),
        dataclasses.replace(
            s, rules=paper, rows=(now, dataclasses.replace(untimed, samples_per_s=11.0))
        ),
    ):
        assert decide(stays).kind == "stay", stays.rows[1]


def test_a_layout_that_nobody_timed_is_tried_and_left_as_soon_as_it_is_known() -> None:
    now = row(16, 10.0, sd=0.01)
    untimed = dataclasses.replace(row(16, 9.5, dp=1, micro=8, sd=0.2), source="predicted")
    s = situation(16, rows=[now, untimed], flags={"copus_layouts": "all"})
    assert decide(s).to == untimed and "worth a trial" in decide(s).reason
    timed = dataclasses.replace(untimed, source="measured")
    further = dataclasses.replace(untimed, configuration=row(64, dp=1, micro=8).configuration)
    guess = dataclasses.replace(now, source="predicted")
    for stays in (
        *(dataclasses.replace(s, rows=rows) for rows in ((now, timed), (guess, untimed))),
        dataclasses.replace(s, rows=(now, further)),
        dataclasses.replace(s, rows=(now, dataclasses.replace(untimed, relative_sd=0.02))),
        dataclasses.replace(s, consumed_samples=s.total_samples - 99 * 16),
        dataclasses.replace(s, consumed_samples=985_000),
        dataclasses.replace(s, paused_s=0.021 * 100_000),
        dataclasses.replace(s, rules=dataclasses.replace(s.rules, policy="static")),
    ):
        assert decide(stays).kind == "stay", stays.rows
    # It was slower than it seemed: back at once, or on to a third one that may be better still.
    slower = dataclasses.replace(timed, samples_per_s=9.5, relative_sd=0.01)
    soon = {"last_relayout_iteration": s.iteration - 10, "steps_since_change": 10}
    tried = dataclasses.replace(s, rows=(now, slower), current=1, **soon)
    assert decide(tried).to == now
    # Pauses at their limit hold back a further trial, but not the way out of this one.
    assert decide(dataclasses.replace(tried, paused_s=1e5)).to == now
    third = dataclasses.replace(row(16, 9.8, dp=1, pp=1, tp=2, sd=0.2), source="predicted")
    assert decide(dataclasses.replace(tried, rows=(now, slower, third))).to == third
    hopeless = dataclasses.replace(third, samples_per_s=6.0)
    assert decide(dataclasses.replace(tried, rows=(now, slower, hopeless))).to == now


@pytest.mark.parametrize(
    ("cost_s", "sd", "left", "where"),
    [
        (0.0, 0.1, 20_000, "other"),
        (60.0, 0.1, 500_000, "other"),
        (300.0, 0.2, 100_000, "other"),
        (60.0, 0.1, 500_000, "slower"),
        (60.0, 0.1, 500_000, "back"),
    ],
)
def test_a_trial_pays_where_drawn_ones_do(cost_s: float, sd: float, left: int, where: str) -> None:
    """The gain from which a trial pays, against the mean time of drawn runs. From each place: the
    best that was timed is the present one; it is on another layout, and a micro-batch of the
    slower present one is tried; or one of that other layout is."""
    here, there = {"dp": 2, "pp": 1}, {"dp": 1, "pp": 2}
    now = row(16, 10.0, sd=0.0, **here)
    known = row(16, 11.0, micro=8, sd=0.01, **there)
    sizes = here if where == "slower" else there
    untimed = dataclasses.replace(row(16, 10.0, micro=2, sd=sd, **sizes), source="predicted")
    rows = [now, untimed] if where == "other" else [now, untimed, known]
    more = {"relayout_cost_s": cost_s, "consumed_samples": 1_000_000 - left}
    s = situation(16, rows=rows, flags={"copus_layouts": "all"}, **more)
    best = 0.0 if where == "other" else math.log(1.1)
    logs_of_rows = [0.0, 0.0, best][: len(rows)]
    found = trial.judge(s, 1, logs_of_rows)
    assert found is not None
    draws = np.random.default_rng(0).standard_normal(400_000)
    logs = math.log1p(found.needed) - best + sd * draws
    rest_s = left / max(r.samples_per_s for r in rows)
    # Pauses of the trial, and of leaving it where it is slower, less that of the way without it.
    moves, leaves = int(where != "slower"), int(where != "back")
    pauses = moves + leaves * (logs < 0) - int(where != "other")
    lost_s = cost_s * pauses + np.maximum(-logs, 0) * trial.TRIED_STEPS * 1.6
    won = float(np.mean(np.maximum(logs, 0) - lost_s / rest_s))
    assert won == pytest.approx(trial.MIN_WON, abs=4 * sd / math.sqrt(400_000))


def test_no_batch_shrinks_on_a_lower_bound_or_after_a_spike() -> None:
    bound = situation(256, measured=noise(8.0, status="lower_bound_only"))
    assert decide(bound).kind == "stay" and "no upper bound" in decide(bound).reason
    held = situation(256, 8.0, hold_shrinking_until_samples=600_000)
    assert decide(held).kind == "stay" and "until sample 600000" in decide(held).reason
    assert decide(situation(16, hold_shrinking_until_samples=600_000)).kind == "batch", "it grows"


def test_schedules_shrink_too_and_a_batch_without_goodput_is_left() -> None:
    falling = {"policy": "step_schedule", "schedule": ((0, 64), (100, 8)), "allow_shrink": True}
    assert decide(situation(64, None, rules=falling)).to.global_batch_size == 8
    flags = {"copus_objective": "lr_model"}
    assert decide(situation(256, 16.0, flags=flags)).to.global_batch_size < 256
    assert decide(situation(256, 16.0, flags={**flags, "copus_allow_shrink": False})).to == row(
        256, saturating()[5].samples_per_s
    )


def test_another_layout_is_weighed_and_taken_where_it_may_and_pays_off() -> None:
    rows = [row(16, 10.0), row(16, 30.0, dp=1), row(16, 20.0, tp=2, dp=1, pp=1)]
    decision = decide(situation(16, 16.0, rows=rows))
    assert decision.kind == "stay"
    other = [c for c in decision.candidates if c.row.layout != rows[0].layout]
    assert other and all("keeps its own" in c.blocked_reason for c in other)
    able = situation(16, 16.0, rows=rows, flags={"copus_layouts": "all"}, relayout_cost_s=30.0)
    assert (decide(able).kind, decide(able).to) == ("relayout", rows[1])
    failed = dataclasses.replace(able, blocked_layouts=(rows[1].layout,))
    assert (decide(failed).kind, decide(failed).to) == ("relayout", rows[2])
    ended = decide(dataclasses.replace(able, relayouts_ended=True))
    assert ended.kind == "stay" and "too many changes" in ended.reason
    late = dataclasses.replace(able, consumed_samples=999_800)
    assert decide(late).kind == "stay"
    assert decide(dataclasses.replace(late, relayout_cost_s=0.5)).kind == "relayout"
    assert DecisionInputs.from_json(json.loads(json.dumps(failed.to_json()))) == failed


def test_the_paper_to_the_letter() -> None:
    """Algorithm 2 by hand: U = T sqrt(B)/(B + Phi), Phi = 2 x 30. Now B = 20, T = 10: U = 0.559."""
    rules = {"grid": (20, 40)}
    table = [
        row(20, 10.0),
        row(20, 10.9, micro=2),
        row(40, 9.0),
        row(20, 12.0, dp=1),
        row(40, 9.5, dp=1),
        row(40, 8.0, micro=2),
    ]
    # 40 on this layout: 9 sqrt(40)/100 = 0.5692 (+1.8 %); 20 on the other: +20 %, discounted by
    # 900/(900 + 90): +9.1 %.
    base = {"rows": table, "rules": rules, "relayout_cost_s": 90.0, "elapsed_s": 900.0}
    base["flags"] = {"copus_policy": "copus", "copus_layouts": "all"}
    assert decide(situation(20, 30.0, **base)).kind == "stay"
    # After four times as long the discount is 3600/3690: +17.1 %.
    later = decide(situation(20, 30.0, **{**base, "elapsed_s": 3600.0}))
    assert later.kind == "relayout" and later.to == table[3]
    # Phi = 400: 40 gains 9 sqrt(40)/440 over 10 sqrt(20)/420 = +21.5 %.
    scaled = decide(situation(20, 200.0, **base))
    assert scaled.kind == "batch" and scaled.to == table[2]
    for gain, acts in ((1.1001, True), (1.0999, False)):
        pair = [row(16, 10.0), row(16, 10.0 * gain, micro=8)]
        edge = situation(16, 16.0, rows=pair, flags={"copus_policy": "copus"})
        assert (decide(edge).kind == "batch") == acts


def test_a_static_batch_stays() -> None:
    flat = [row(b, 10.0) for b in GRID]
    assert follow(situation(8, 500.0, rows=flat, flags={"copus_policy": "static"}), 5) == [8] * 6


def test_schedules_by_position() -> None:
    rules = shipped_rules(policy="step_schedule", schedule=((0, 768), (100, 1536)))
    assert [scheduled_batch(rules, at, 1000) for at in (0, 99, 100)] == [768, 768, 1536]
    after = {"copus_policy": "doubling", "copus_doubling_first_tokens": 168 * 128.0}
    merrill = shipped_rules(1024, flags=after)
    assert [scheduled_batch(merrill, at, 1000) for at in (0, 167, 168, 503, 504)] == [
        *(1024, 1024, 2048, 2048, 4096)
    ]
    assert scheduled_batch(shipped_rules(flags={"copus_policy": "static"}), 5, 10) is None
    assert snap(127.9, GRID, policy="doubling") == 64


@pytest.mark.parametrize("allow_shrink", [False, True])
@pytest.mark.parametrize("objective", ["copus", "goodput"])
def test_a_steady_noisy_noise_scale_makes_no_batch_swing(
    objective: str, allow_shrink: bool
) -> None:
    """10,000 steps each, decided every 20: the batch finds its place and does not go to and fro."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        phi, half_life = float(np.exp(rng.uniform(3, 6))), 20_000.0
        speeds = {b: 100.0 * b / (b + 40) * float(np.exp(rng.normal(0, 0.02))) for b in GRID}
        rows = [row(b, v, sd=0.02) for b, v in speeds.items()]
        flags = {"copus_allow_shrink": allow_shrink, "copus_objective": objective}
        s = situation(8, phi, rows=rows, flags=flags, consumed_samples=0, total_samples=10**7)
        error, sd, sizes = 0.0, 0.25, [8]
        for step in range(0, 10_000, 20):
            batch = s.now.global_batch_size
            keep = 2.0 ** (-20 * batch / half_life)
            error = keep * error + math.sqrt(1 - keep**2) * float(rng.normal(0, sd))
            s = dataclasses.replace(
                s,
                noise=noise(phi * math.exp(error), sd=sd),
                iteration=step,
                consumed_samples=s.consumed_samples + 20 * batch,
            )
            decision = decide(s)
            to, critical = decision.to.global_batch_size, s.critical_batch_size
            s = dataclasses.replace(s, current=s.rows.index(decision.to))
            if changed := to != batch:
                s = dataclasses.replace(
                    s,
                    last_change_samples=s.consumed_samples,
                    critical_batch_size_when_shrunk=critical if to < batch else None,
                    critical_batch_size_when_grown=critical if to > batch else None,
                )
            if changed:
                sizes.append(decision.to.global_batch_size)
        turns = sum((b > a) != (c > b) for a, b, c in zip(sizes, sizes[1:], sizes[2:]))
        assert turns <= allow_shrink, (seed, sizes)
