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
from copus_ext.goodput import targets
from copus_ext.goodput.belief import Look
from copus_ext.goodput.decide import decide, gain_words
from copus_ext.goodput.inputs import Candidate, ConfigThroughput, Decision, DecisionInputs
from copus_ext.goodput.policies import POLICIES
from copus_ext.goodput.state import ControllerState
from copus_ext.goodput.targets import scheduled_batch
from tests.helpers import recorded
from tests.helpers.recorded import row, shipped_rules

GRID = (8, 16, 32, 64, 128, 256, 512)


def saturating(half: float = 24.0) -> list[ConfigThroughput]:
    """Throughput in proportion to B/(B + half): twice the batch is never twice as slow."""
    return [row(b, 100.0 * b / (b + half)) for b in GRID]


def noise(phi: float | None, *, sd: float = 0.0, **more: Any) -> NoiseScale:
    return recorded.noise(phi, spread=math.exp(1.96 * sd), **more)


def looks(phi: float | None) -> tuple[Look, ...]:
    """Looks at a noise scale that stands still over the run until here."""
    at = (1e4, 5e4, 1e5, 2e5, 3e5, 4e5, 5e5)
    return (
        ()
        if phi is None
        else tuple(Look(samples=x, noise_scale=phi, log_variance=0.01) for x in at)
    )


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
        "elapsed_s": 50_000.0,
        "relayout_cost_s": 60.0,
        "looks": looks(phi),
        **more,
    }
    given = {"copus_noise_scale_multiplier": 4.0, **(flags or {})}
    if "copus_policy" in given:
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


def expected(s: DecisionInputs, size: int, speed: float) -> float:
    """ln of the seconds for a unit of progress at a batch, over draws of the belief."""
    mean, sd = (x[0] for x in s.belief.log_critical_batch_size(s.trained_samples))
    z = np.linspace(-8.0, 8.0, 8_001)
    density = np.exp(-z * z / 2.0)
    needed = np.log1p(size / np.exp(mean + sd * z))
    return float(density @ needed / density.sum()) - math.log(speed)


@pytest.mark.parametrize("phi", [1, 8, 64, 512, None])
def test_a_run_goes_where_it_is_expected_to_finish_soonest(phi: float | None) -> None:
    """Brute force over the grid; four times the batch at most."""
    s = situation(8, phi)
    best = min(saturating(), key=lambda r: expected(s, r.global_batch_size, r.samples_per_s))
    sizes = follow(s)
    assert sizes[-1] == decide(s).target_batch == best.global_batch_size
    assert all(after <= 4 * before for before, after in itertools.pairwise(sizes))
    down = follow(situation(512, phi))
    assert down[1] == down[-1] == best.global_batch_size, "any way down at once"


def test_the_law_alone_decides_before_the_noise_is_seen_and_early_it_asks_for_less() -> None:
    sizes = []
    for consumed in (1_000, 100_000, 900_000):
        s = situation(16, None, consumed_samples=consumed)
        sizes.append(decide(s).target_batch)
        assert "by the published law alone" in s.critical_batch_size_words
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


def test_a_decision_says_what_its_critical_batch_size_comes_from() -> None:
    s = situation(16, 64.0)
    likely, low, high = s.belief.interval(s.trained_samples)
    words = f"critical batch size about {likely:.0f} samples ({low:.0f} to {high:.0f})"
    assert words in decide(s).reason and s.critical_batch_size == likely
    found = decide(s)
    ends = found.critical_batch_size_low, found.critical_batch_size_high
    assert (found.critical_batch_size, *ends) == (likely, low, high)
    published = situation(16, 64.0, flags={"copus_policy": "cbs"})
    assert "critical batch size 128.0 = 2 x noise scale 64.0" in decide(published).reason
    assert published.critical_batch_size_range == (None, None)


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
    names = ("consumed_samples", "total_samples", "hold_growth_until_samples")
    rules = dataclasses.replace(s.rules, length_ratio=4)
    longer = {name: 4 * getattr(s, name) for name in names}
    found, told = decide(dataclasses.replace(s, rules=rules, **longer)), decide(s)
    assert found.to == told.to and found.kind == told.kind
    assert found.critical_batch_size == told.critical_batch_size and found.gain == told.gain


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"paused": True}, "paused"),
        ({"skipped_steps": 6}, "6 of the last 100 steps were skipped"),
        ({"consumed_samples": 1_000_000}, "the run is over"),
        ({"in_ramp": True}, "follows the last growth"),
        ({"hold_growth_until_samples": 600_000}, "until sample 600000"),
    ],
)
def test_what_keeps_a_batch(more: dict[str, Any], words: str) -> None:
    assert decide(situation(16)).kind == "batch"
    decision = decide(situation(16, **more))
    assert decision.kind == "stay" and words in decision.reason


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
    # A run that began there goes by the law, and gives up no speed for a measurement.
    assert decide(situation(16, phi, rows=[blind, slow])).kind == "stay"
    # Whoever needs no noise scale takes what is fastest.
    assert decide(situation(16, phi, rows=rows, flags={"copus_policy": "static"})).to == blind


def test_a_micro_batch_that_nobody_timed_is_tried() -> None:
    now = row(16, 10.0)
    untimed = dataclasses.replace(row(16, 9.8, micro=8, sd=0.15), source="predicted")
    s = situation(16, rows=[now, untimed])
    assert decide(s).to == untimed and ", worth a short trial (the limit" in decide(s).reason
    for stays in (
        dataclasses.replace(untimed, samples_per_s=6.0),
        dataclasses.replace(untimed, relative_sd=0.02),
        dataclasses.replace(untimed, source="measured"),
    ):
        assert decide(dataclasses.replace(s, rows=(now, stays))).kind == "stay"
    # It was slower than it seemed: back, as soon as that is known.
    slower = dataclasses.replace(untimed, samples_per_s=9.5, source="measured")
    assert decide(dataclasses.replace(s, rows=(now, slower), current=1)).to == now


def test_a_layout_that_nobody_timed_is_tried_once_the_present_one_is_known() -> None:
    now = row(16, 10.0)
    untimed = dataclasses.replace(row(16, 9.8, dp=1, micro=8, sd=0.2), source="predicted")
    s = situation(16, rows=[now, untimed], flags={"copus_layouts": "all"})
    assert decide(s).to == untimed and ", worth a short trial (the limit" in decide(s).reason
    guess = dataclasses.replace(now, source="predicted")
    early = decide(dataclasses.replace(s, rows=(guess, untimed)))
    assert early.kind == "stay" and "not timed yet" in early.reason
    assert decide(dataclasses.replace(s, consumed_samples=999_000)).kind == "stay", "no rest to win"
    slower = dataclasses.replace(untimed, samples_per_s=9.5, source="measured")
    tried = dataclasses.replace(s, rows=(now, slower), current=1)
    assert decide(tried).to == now
    third = dataclasses.replace(row(16, 10.2, dp=1, pp=1, tp=2, sd=0.3), source="predicted")
    assert decide(dataclasses.replace(tried, rows=(now, slower, third))).to == third


def test_what_holds_a_shrink_back() -> None:
    assert decide(situation(512, 1.0)).to.global_batch_size < 512
    assert decide(situation(512, 1.0, flags={"copus_allow_shrink": False})).kind == "stay"
    held = situation(512, 1.0, hold_shrinking_until_samples=600_000)
    assert decide(held).kind == "stay" and "until sample 600000" in decide(held).reason
    assert decide(situation(16, hold_shrinking_until_samples=600_000)).kind == "batch", "it grows"


def test_schedules_shrink_too() -> None:
    falling = {"policy": "step_schedule", "schedule": ((0, 64), (100, 8)), "allow_shrink": True}
    assert decide(situation(64, None, rules=falling)).to.global_batch_size == 8


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
    assert ended.kind == "stay" and "too many others" in ended.reason
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
    assert targets.DOUBLING.snap(127.9, GRID) == 64


def test_a_steady_noisy_noise_scale_makes_no_batch_swing() -> None:
    """Some thousand steps, decided every 20: the batch finds its place and stays there."""
    for seed in range(2):
        rng = np.random.default_rng(seed)
        phi, half_life = float(np.exp(rng.uniform(3, 6))), 20_000.0
        speeds = {b: 100.0 * b / (b + 40) * float(np.exp(rng.normal(0, 0.02))) for b in GRID}
        rows = [row(b, v) for b, v in speeds.items()]
        s = situation(8, None, rows=rows, consumed_samples=0, total_samples=10**6)
        state, error, sd, sizes = ControllerState(), 0.0, 0.25, [8]
        for _ in range(400):
            batch = s.now.global_batch_size
            keep = 2.0 ** (-20 * batch / half_life)
            error = keep * error + math.sqrt(1 - keep**2) * float(rng.normal(0, sd))
            consumed = s.consumed_samples + 20 * batch
            seen = noise(phi * math.exp(error), sd=sd)
            state.look(seen, samples=float(consumed), half_life=half_life)
            s = dataclasses.replace(s, looks=tuple(state.looks), consumed_samples=consumed)
            to = decide(s).to
            s = dataclasses.replace(s, current=s.rows.index(to))
            sizes += [to.global_batch_size] if to.global_batch_size != batch else []
        turns = sum((b > a) != (c > b) for a, b, c in zip(sizes, sizes[1:], sizes[2:]))
        assert turns <= 2, (seed, sizes)


def test_a_batch_that_may_not_shrink_hides_no_layout() -> None:
    """A small batch would be far better than the present one, but is out of the question."""
    rows = [row(8, 30.0), row(256, 40.0), row(8, 31.0, dp=1), row(256, 60.0, dp=1)]
    flags = {"copus_layouts": "all", "copus_allow_shrink": False}
    s = situation(256, 0.1, rows=rows, flags=flags, relayout_cost_s=1.0)
    decision = decide(s)
    assert (decision.kind, decision.to) == ("relayout", rows[3]), decision.reason
    assert decision.target_batch == 256
    assert decide(dataclasses.replace(s, rows=tuple(rows[:2]), current=1)).kind == "stay"


def test_what_is_blind_hides_no_layout() -> None:
    """One micro-batch would be fastest on the other layout, or on the present one."""
    now, seen = row(16, 10.0), row(16, 13.0, tp=2, dp=1, pp=1, micro=8)
    blind = row(16, 14.0, tp=2, dp=1, pp=1, micro=16)
    flags = {"copus_layouts": "all"}
    s = situation(16, rows=[now, blind, seen], flags=flags, relayout_cost_s=1.0)
    assert decide(s).to == seen, decide(s).reason
    # Its speed does not count for the layout either, and the present one's blind row for neither.
    slow = dataclasses.replace(seen, samples_per_s=9.0)
    assert decide(dataclasses.replace(s, rows=(now, blind, slow))).kind == "stay"
    away = dataclasses.replace(s, rows=(slow, blind, now))
    assert decide(away).to == now, decide(away).reason


@pytest.mark.parametrize("source", ["measured", "predicted"])
def test_a_decision_before_the_last_step_of_a_fast_run(source: str) -> None:
    """One sample is left, and a pause would take thousands of times as long."""
    faster = dataclasses.replace(row(16, 2000.0, dp=1, sd=0.05), source=source)
    s = situation(16, rows=[row(16, 1000.0), faster], flags={"copus_layouts": "all"})
    decision = decide(dataclasses.replace(s, consumed_samples=999_999))
    assert decision.kind == "stay" and "pause would not pay off" in decision.reason
    json.dumps(decision.to_json(), allow_nan=False)


def test_a_batch_that_a_spike_holds_back_hides_no_layout() -> None:
    """The other layout is fastest with twice the batch, which is held, and faster without."""
    rows = [row(16, 10.0), row(32, 13.0), row(16, 15.0, dp=1), row(32, 22.0, dp=1)]
    s = situation(16, rows=rows, flags={"copus_layouts": "all"}, relayout_cost_s=1.0)
    held = dataclasses.replace(s, hold_growth_until_samples=s.consumed_samples + 1)
    assert decide(s).to == rows[3] and decide(held).to == rows[2], decide(held).reason


def test_nothing_changes_on_speeds_that_were_made_up_before_one_was_measured() -> None:
    others = [dataclasses.replace(row(b, 10.0, sd=0.05), source="assumed") for b in (4, 8, 16)]
    s = situation(16, None, rows=others, consumed_samples=16)
    decision = decide(s)
    assert decision.kind == "stay" and "not timed yet" in decision.reason
    known = dataclasses.replace(others[2], source="measured")
    assert decide(dataclasses.replace(s, rows=(*others[:2], known))).to.global_batch_size < 16


def test_a_schedule_of_the_user_waits_for_no_timing() -> None:
    """As after a restart shortly before its next batch."""
    rules = {"policy": "step_schedule", "schedule": ((0, 16), (100, 32))}
    rows = [dataclasses.replace(row(b, 10.0, sd=0.05), source="assumed") for b in (16, 32)]
    s = situation(16, None, rows=rows, rules=rules, consumed_samples=128)
    assert decide(s).to == rows[1], decide(s).reason


@pytest.mark.parametrize(
    ("gain", "needed", "sd", "words"),
    [
        (-0.0004, 0.01, 0.0, "predicted to gain 0.0 %, too little (it needs 1.0 %)"),
        (-0.0006, 0.01, 0.0, "predicted to lose 0.1 %, too little (it needs 1.0 %)"),
        (-1e-9, -1e-9, 0.1, "predicted to gain 0.0 +- 10.0 %, not worth a short trial (the limit"),
        (0.2, -1e-9, 0.1, "(the limit is a predicted gain of 0.0 %)"),
        (0.2, -0.02, 0.1, "(the limit is a predicted loss of 2.0 %)"),
    ],
)
def test_nothing_is_not_called_a_loss(gain: float, needed: float, sd: float, words: str) -> None:
    found = Candidate(row=row(8), gain=gain, needed=needed, gain_sd=sd, blocked_reason="too little")
    assert words in gain_words(found)
