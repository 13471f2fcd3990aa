"""Flags, rules and throughput table of the controller."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from copus_ext.controller import flags as config_module
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.headroom_notice import HeadroomNotice
from copus_ext.controller.link_timing import Link
from copus_ext.controller.pause_prior import PausePrior, machine_of
from copus_ext.controller.rules import (
    batches_to_weigh,
    check,
    check_run,
    rate_rules_of,
    rules_of,
    samples_to_decision,
    tensor_parallel_sizes,
)
from copus_ext.controller.throughput_table import ThroughputTable, configuration_of_run
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.gpus import GPUS
from copus_ext.goodput import belief, costs, lr_scaling, question
from copus_ext.goodput.config_change import ConfigChange
from copus_ext.goodput.costs import FIXED_S, RELAUNCH_S
from copus_ext.goodput.decide import decide
from copus_ext.goodput.headroom import Headroom
from copus_ext.goodput.inputs import ConfigThroughput, Rules
from copus_ext.goodput.lr_scaling import RateRules
from copus_ext.goodput.messages import decision_line, length_line, summary
from copus_ext.goodput.state import MIN_TIMED_STEPS, WARM_UP_STEPS, ControllerState
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing
from megatron.trainer.common.control import GENERATION_VARIABLE
from megatron.trainer.common.errors import UsageError, counted
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.relayout import with_layout
from tests.helpers.jobs import TINY
from tests.helpers.launch import ROOT
from tests.unit.test_decide import situation


def config(more: str = "", world: int = 2) -> Any:
    return resolve(parse_args([*TINY.split(), "--train-samples", "6400", *more.split()]), world)


def flags(**values: Any) -> CopusConfig:
    return CopusConfig(copus=True, **values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"copus_noise_scale_multiplier": 0.0}, "--copus-noise-scale-multiplier 0"),
        ({"copus_interval": -1.0}, "--copus-interval -1"),
        ({"copus_max_global_batch_size": 0}, "--copus-max-global-batch-size 0"),
        ({"copus_batch_grid": "8,x"}, "--copus-config: batch_grid 8,x"),
        ({"copus_doubling_ratio": 1.0}, "--copus-config: doubling_ratio 1"),
        ({"copus_doubling_ratio": math.inf}, "--copus-config: doubling_ratio inf must exceed 1"),
        ({"copus_lr_ramp_steps": -1}, "--copus-config: lr_ramp_steps -1"),
        ({"copus_relayout_checkpoint_tokens": 0.0}, "--copus-config: relayout_checkpoint_tokens 0"),
        ({"copus_gns_interval": 0}, "--copus-config: gns_interval 0"),
        ({"copus_gns_half_life_tokens": 0.0}, "--copus-config: gns_half_life_tokens 0"),
        (
            {"copus_min_global_batch_size": 16, "copus_max_global_batch_size": 8},
            "--copus-min-global-batch-size 16 is above",
        ),
    ],
)
def test_flags_that_make_no_sense(values: dict[str, Any], words: str) -> None:
    check(flags())
    with pytest.raises(UsageError, match=words):
        check(flags(**values))


@pytest.mark.parametrize(
    ("values", "more", "words"),
    [
        ({"copus_policy": "step_schedule"}, "", "needs --step-batch-size-schedule"),
        ({"copus_max_global_batch_size": 4}, "", "the first batch, 8, is not between"),
        (
            {"copus_layouts": "all", "copus_relayout": "relaunch"},
            "--save somewhere --no-save-optim",
            "--no-save-optim leaves without moments; drop one",
        ),
    ],
)
def test_flags_that_contradict_the_run(values: dict[str, Any], more: str, words: str) -> None:
    check_run(flags(), config())
    eight_bits = config().replace(fp8="hybrid")
    check_run(flags(), eight_bits)
    with pytest.raises(UsageError, match=r"--fp8-format.*--copus-relayout relaunch"):
        check_run(flags(copus_layouts="all"), eight_bits)
    check_run(flags(copus_layouts="all", copus_mode="observe"), eight_bits)
    with pytest.raises(UsageError, match=words):
        check_run(flags(**values), config(more))


def test_the_grid_holds_what_the_layout_can_cut() -> None:
    assert rules_of(flags(), config()).grid == (2, 4, 8, 16, 32, 64, 128, 256, 512)
    up = flags(copus_allow_shrink=False)
    assert rules_of(up, config()).grid == (8, 16, 32, 64, 128, 256, 512)
    some = flags(copus_batch_grid="24,27", copus_max_global_batch_size=40)
    assert rules_of(some, config()).grid == (2, 4, 8, 16, 24, 32)
    uneven = rules_of(flags(copus_batch_grid="30"), config("--global-batch-size 9", world=3))
    assert uneven.grid[:3] == (9, 18, 30)
    assert batches_to_weigh(rules_of(flags(), config()), 16) == [2, 4, 8, 16, 32, 64, 128]
    published = flags(copus_policy="copus")
    assert batches_to_weigh(rules_of(published, config()), 16) == [8, 16, 32, 64]


def test_the_papers_policy_is_the_papers() -> None:
    steps = ["--step-batch-size-schedule", "0:4 2K:8"]
    falling = resolve(parse_args([*TINY.split(), "--train-samples", "640", *steps]), 2)
    of_schedule = flags(copus_policy="step_schedule")
    assert rules_of(of_schedule, falling).grid == (4, 8)
    assert rate_rules_of(of_schedule, falling).reference_batch == 4
    paper = rate_rules_of(flags(copus_policy="copus"), config("--adam-beta2 0.95"))
    assert (paper.ramp_steps, paper.weight_decay) == (0, "const")
    ours = rate_rules_of(flags(), config("--adam-beta2 0.95"))
    assert (ours.ramp_steps, ours.weight_decay) == (20, "tokens")


OBJECTIVE, CONTROLLER = "docs/decisions/020-goodput-with-c-4.md", "docs/controller.md"
BOTH_WAYS = "docs/decisions/032-the-batch-goes-both-ways.md"
RULE = "docs/decisions/077-one-belief-and-one-question.md"
SHIPPED = [
    # The rules of a run with --copus alone whose first batch is 8, and what justifies each.
    ("policy", "adaptive", CONTROLLER),
    ("noise_scale_multiplier", 8.0, BOTH_WAYS),
    ("reference_batch", 8, CONTROLLER),
    ("first_batch", 8, CONTROLLER),
    ("grid", (2, 4, 8, 16, 32, 64, 128, 256, 512), BOTH_WAYS),
    ("allow_shrink", True, BOTH_WAYS),
    ("growth", 4.0, BOTH_WAYS),
    ("min_effective_steps", 20.0, "docs/controller.md"),
    ("schedule", (), CONTROLLER),
    ("doubling_first_samples", None, CONTROLLER),
    ("doubling_ratio", 3.0, "copus_ext/controller/flags.py"),
    ("relayout", False, "docs/decisions/016-layouts-change-on-request.md"),
    ("anneal_share", 0.0, "docs/decisions/034-annealing-by-batch.md"),
    ("seq_length", 32, RULE),
    ("length_ratio", 1, "docs/decisions/038-phases-count-in-the-first-length.md"),
]
SHIPPED_RATES = [
    ("lr", "sqrt", CONTROLLER),
    ("weight_decay", "tokens", CONTROLLER),
    ("beta2_rule", "const", CONTROLLER),
    ("beta2", 0.95, CONTROLLER),
    ("reference_batch", 8, CONTROLLER),
    ("ramp_steps", 20, "docs/decisions/014-batch-ramp-at-most-100-steps.md"),
    ("max_ramp_samples", 0.05 * 6400, "docs/decisions/066-the-schedule-is-the-users.md"),
]
CONSTANTS = [
    (config_module.PUBLISHED_NOISE_SCALE_MULTIPLIER, 2.0, OBJECTIVE),
    (config_module.MAX_SHRINKING, 64, BOTH_WAYS),
    (config_module.DECISION_STEPS, 20, CONTROLLER),
    (lr_scaling.MAX_RAMP_SHARE, 0.05, "docs/decisions/066-the-schedule-is-the-users.md"),
    (lr_scaling.MAX_RAMP_STEPS, 100, "docs/decisions/014-batch-ramp-at-most-100-steps.md"),
    (costs.MAX_FAILURES, 3, "docs/decisions/016-layouts-change-on-request.md"),
    (costs.RELAUNCH_S, 60.0, "copus_ext/controller/flags.py"),
    (question.MARGIN, 0.01, RULE),
    (question.PAUSES, 5.0, RULE),
    (belief.LEVEL_SD, math.log(4.0), RULE),
    (belief.EXPONENT, 0.46, RULE),
    (belief.EXPONENT_SD, 0.2, RULE),
    (belief.WANDER_SD, 0.3, RULE),
    (belief.MULTIPLIER_SD, math.log(3.0), RULE),
    (belief.LOOK_SD, 0.1, RULE),
    (belief.EARLIEST, 0.003, RULE),
    (belief.APART, 2.0, RULE),
    (belief.MIN_STEPS, 10.0, RULE),
    (MIN_TIMED_STEPS + WARM_UP_STEPS, 8, "docs/decisions/019-doubt-of-a-ratio.md"),
]


def test_what_ships_is_what_is_written_down() -> None:
    """A default that changes decisions changes together with the page that justifies it."""
    rules = asdict(rules_of(flags(), config()))
    of_rates = asdict(rate_rules_of(flags(), config("--adam-beta2 0.95")))
    assert set(rules) == {name for name, _, _ in SHIPPED}, "a rule without a reason"
    assert set(of_rates) == {name for name, _, _ in SHIPPED_RATES}, "a rate without a reason"
    said = (ROOT / "docs" / "copus.yaml").read_text()
    assert f"measured noise scale. Default: {rules['noise_scale_multiplier']:g};" in said
    found = [(rules[name], want, page, name) for name, want, page in SHIPPED]
    found += [(of_rates[name], want, page, name) for name, want, page in SHIPPED_RATES]
    found += [(value, want, page, f"{want}") for value, want, page in CONSTANTS]
    for value, want, page, name in found:
        assert (ROOT / page).exists(), page
        assert value == want, f"{name} is {value}, and {page} justifies {want}: change both"
    assert flags().copus_mode == "act", "docs/decisions/012-copus-acts-by-default.md justifies act"
    every = [
        samples_to_decision(flags(), config(), 8, ControllerState(last_decision_samples=samples))
        for samples in (0, 8, 16, 80, 800)
    ]
    assert every == [8, 8, 16, 80, 160], "docs/controller.md says 20 steps between decisions"


def test_what_is_tried_is_decided_on_every_ten_steps_until_its_outcome_is_known() -> None:
    state = ControllerState(last_decision_samples=800)
    sizes: dict[str, Any] = {"from_micro_batch": 1, "to_micro_batch": 2, "from_batch": 8}

    def samples(change: ConfigChange, **own: Any) -> float:
        state.open_change = change
        return samples_to_decision(flags(**own), config(), 8, state)

    tried = ConfigChange(decision=1, consumed_samples=800, to_batch=8, **sizes)
    grown = ConfigChange(decision=1, consumed_samples=800, to_batch=16, **sizes)
    assert samples(tried) == 10 * 8 and samples(grown) == 20 * 8
    assert samples(tried, copus_policy="copus") == 20 * 8
    state.last_decision_samples = 880
    assert samples(tried) == 10 * 8, "ten steps were not enough to tell"
    state.open_change = None
    assert samples_to_decision(flags(), config(), 8, state) == 20 * 8


def test_rules_have_no_defaults_of_their_own() -> None:
    for kind in (Rules, RateRules):
        own = [f.name for f in fields(kind) if f.default is not MISSING]
        assert not own, f"{kind.__name__}: defaults stand in copus_ext/controller/flags.py: {own}"


def rows_of(
    table: ThroughputTable,
    batches: list[int],
    measured: Any = lambda c: None,
    *,
    micro: int = 1,
    batch: int = 8,
) -> tuple[list[ConfigThroughput], ConfigThroughput]:
    """The rows of a run that goes at `batch` in micro-batches of `micro`, and the present one."""
    rows, at = table.rows(
        batches, micro_batch_size=micro, global_batch_size=batch, measured=measured
    )
    return rows, rows[at]


def test_the_table_of_a_run() -> None:
    times: dict[tuple[int, int], tuple[float, float, int]] = {(1, 8): (0.5, 0.001, 20)}

    def measured(c: Configuration) -> Any:
        return times.get((c.micro_batch_size, c.global_batch_size))

    table = ThroughputTable(config(), flags(), gpu=None)
    assert not table.note
    rows, now = rows_of(table, [8, 16], measured)
    assert (now.global_batch_size, now.micro_batch_size, now.source) == (8, 1, "measured")
    assert now.samples_per_s == pytest.approx(16.0, rel=0.02)
    found = {(r.global_batch_size, r.micro_batch_size) for r in rows}
    assert found == {(8, b) for b in (1, 2, 4)} | {(16, b) for b in (1, 2, 4, 8)}
    assert all(r.layout == Layout(dp=2) for r in rows)
    # Of one throughput over the present one: what all have in common is no doubt.
    assert now.relative_sd == 0.0 and all(0 < r.relative_sd < 0.25 for r in rows if r != now)
    # A measured time moves its kin: the untried batch is about as slow as the tried one.
    kin = next(r for r in rows if (r.global_batch_size, r.micro_batch_size) == (16, 1))
    assert kin.samples_per_s == pytest.approx(16.0, rel=0.4) and kin.relative_sd < 0.1
    # Once the end of its steps was timed, too, it is known how slow.
    ends: dict[str, Any] = {"measured": measured, "end_share": lambda c: 0.05}
    rows, _ = table.rows([8, 16], micro_batch_size=1, global_batch_size=8, **ends)
    timed = next(r for r in rows if (r.global_batch_size, r.micro_batch_size) == (16, 1))
    assert timed.samples_per_s == pytest.approx(16.0 * 2 / 1.95, rel=0.05)
    assert timed.relative_sd < kin.relative_sd
    times[1, 8] = (0.25, 0.001, 20)
    _, faster = rows_of(table, [8, 16], measured)
    assert faster.samples_per_s == pytest.approx(32.0, rel=0.02)


def test_steps_that_scatter_do_not_make_the_luckiest_batch_the_fastest() -> None:
    """Both batches take as long a sample. Where steps scatter by a third, the one with the luckier
    twenty steps looks faster by more than the truth in most of the cases."""
    table = ThroughputTable(config(), flags(), gpu=None)
    expected = {r.global_batch_size: r.samples_per_s for r in rows_of(table, [8, 16])[0]}
    random = np.random.default_rng(3)
    raw, told = [], []
    for _ in range(40):
        times = {b: b / x * np.exp(0.3 * random.standard_normal(20)) for b, x in expected.items()}
        middle = {b: float(np.median(t)) for b, t in times.items()}

        def measured(c: Configuration, times: Any = times, middle: Any = middle) -> Any:
            b = c.global_batch_size
            return (middle[b], float(np.median(np.abs(times[b] - middle[b]))), 20)

        rows, now = rows_of(table, [8, 16], measured)
        other = next(r for r in rows if r.global_batch_size == 16 and r.source == "measured")
        true = expected[16] / expected[8]
        raw.append(math.log(16 / middle[16] * middle[8] / 8 / true))
        told.append(math.log(other.samples_per_s / now.samples_per_s / true))
        assert now.samples_per_s == pytest.approx(8 / middle[8])
        assert other.relative_sd > 0.05
    assert np.std(told) < 0.5 * np.std(raw)


@pytest.mark.parametrize("factor", [0.05, 1.0, 20.0])
def test_what_is_called_measured_was_measured_and_scales_the_rest(factor: float) -> None:
    """Under a profile of an hour in which this machine was 20 times as fast, or slow."""
    table = ThroughputTable(config(), flags(), gpu=None)
    c = configuration_of_run(table.config, 1, 8)
    table.profiled = [
        Timing(configuration=replace(c, global_batch_size=b), step_s=0.5 * factor * b / 8)
        for b in (8, 16)
    ]
    for spread in (0.001, 0.1):  # of steps that take much the same, or not
        rows, now = rows_of(table, [8, 16], lambda x, s=spread: (0.5, s, 20) if x == c else None)
        assert (now.source, now.samples_per_s) == ("measured", 16.0)
        others = [r for r in rows if r != now]
        assert all(r.source != "measured" for r in others)
        assert all(12.0 < r.samples_per_s < 32.0 for r in others), "no gain that nothing explains"


@pytest.mark.parametrize(
    ("more", "is_cut"),
    [
        ("", True),
        ("--tensor-model-parallel-size 2", False),
        ("--tensor-model-parallel-size 2 --sequence-parallel", True),
    ],
)
def test_rows_are_as_the_run_would_be_under_their_layouts(more: str, is_cut: bool) -> None:
    run = config(more)
    table = ThroughputTable(run, flags(copus_layouts="all"), gpu=None)
    rows, now = rows_of(table, [8], lambda c: (0.5, 0.001, 20))
    assert now.source == "measured"
    assert {row.layout.tp for row in rows} == {1, 2}
    for row in rows:
        moved = with_layout(run, row.layout).parallel.sequence_parallel
        assert row.configuration.sequence_parallel == moved == (is_cut and row.layout.tp > 1)


def test_a_model_that_the_cost_model_does_not_know_keeps_its_layout() -> None:
    run = config()
    run = replace(run, model=replace(run.model, multi_latent_attention=True))
    table = ThroughputTable(run, flags(copus_layouts="all"), gpu=None)
    assert "--multi-latent-attention" in table.note and "the layout stays" in table.note
    rows, now = rows_of(table, [8, 16], lambda c: (0.5, 0.001, 20))
    assert {row.layout for row in rows} == {run.layout}
    assert {row.global_batch_size for row in rows} == {8, 16} and now.global_batch_size == 8


def test_the_rows_of_the_vocabulary_divide_by_every_tensor_size_that_may_be_chosen() -> None:
    run = config()
    assert tensor_parallel_sizes(flags(), run) == []
    run = replace(run, parallel=replace(run.parallel, data_parallel_size=12))
    shape = {"num_attention_heads": 6, "num_query_groups": 3, "ffn_hidden_size": 192}
    shape |= {"group_query_attention": True}
    run = replace(run, model=replace(run.model, **shape))
    assert tensor_parallel_sizes(flags(copus_layouts="all"), run) == [1, 3, 6]


def test_a_profile_of_a_faster_hour_makes_no_configuration_faster_than_the_present_one() -> None:
    table = ThroughputTable(config(), flags(), gpu=None)
    profiled = {(1, 2): 0.20, (1, 4): 0.36, (2, 1): 0.22, (2, 2): 0.38, (4, 1): 0.41}
    zero = table.config.parallel.use_distributed_optimizer
    table.profiled = [
        Timing(
            configuration=Configuration(
                layout=Layout(dp=2),
                micro_batch_size=b,
                global_batch_size=2 * b * n,
                use_distributed_optimizer=zero,
                overlap=False,
            ),
            step_s=step_s,
            num_steps=5,
        )
        for (b, n), step_s in profiled.items()
    ]

    def sizes(r: ConfigThroughput) -> tuple[int, int]:
        return r.micro_batch_size, r.global_batch_size

    def over_now(step_s: float) -> list[float]:
        def measured(c: Configuration) -> Any:
            is_now = (c.micro_batch_size, c.num_microbatches) == (1, 4)
            return (step_s, 0.001, 20) if is_now else None

        rows, now = rows_of(table, [4, 8], measured)
        assert now.samples_per_s == pytest.approx(8 / step_s, rel=0.02)
        return [r.samples_per_s / now.samples_per_s for r in sorted(rows, key=sizes)]

    assert over_now(0.36 * 1.25) == pytest.approx(over_now(0.36), rel=0.02)


def test_the_table_keeps_the_cut_of_the_flags() -> None:
    pipeline = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    run = config(f"{pipeline} Ettt|tL")
    run = replace(run, model=replace(run.model, padded_vocab_size=512))
    free = flags(copus_layouts="all")
    for here in (run, with_layout(run, Layout(dp=2))):
        table = ThroughputTable(here, free, gpu=None, flag_layout=run.layout)
        rows, now = rows_of(table, [8, 16])
        assert now.layout == here.layout
        assert {r.layout for r in rows} == {
            run.layout,
            Layout(pp=2, vpp=2),
            Layout(tp=2),
            Layout(cp=2),
            Layout(dp=2),
        }
    odd = config(f"{pipeline} Ettt|ttL --num-layers 5")

    def timed(c: Configuration) -> Any:
        own = (c.layout, c.micro_batch_size, c.global_batch_size) == (odd.layout, 1, 8)
        return (0.5, 0.001, 20) if own else None

    rows, now = rows_of(ThroughputTable(odd, free, gpu=None), [8, 16], timed)
    own = [r for r in rows if r.layout == odd.layout]
    assert [(r.global_batch_size, r.source) for r in own] == [(8, "measured"), (16, "assumed")]
    assert now == own[0] and own[0].layout.layer_partition == (3, 2)
    plain = json.loads(json.dumps(own[0].to_json()))
    assert ConfigThroughput.from_json(plain) == own[0]


@pytest.mark.parametrize(("micro", "batch"), [(8, 6), (4, 10)])
def test_steps_of_uneven_micro_batches_are_only_themselves(micro: int, batch: int) -> None:
    run = config(f"--allow-uneven-micro-batches --micro-batch-size {micro} --global-batch-size 10")

    def measured(c: Configuration) -> Any:
        own = (c.micro_batch_size, c.global_batch_size) == (micro, batch)
        return (1.0, 0.001, 20) if own else None

    table = ThroughputTable(run, flags(), gpu=None)
    rows, now = rows_of(table, [batch, 8], measured, micro=micro, batch=batch)
    assert (now.global_batch_size, now.source) == (batch, "measured")
    assert now.samples_per_s == pytest.approx(batch, rel=0.01)
    assert all(r.source != "measured" for r in rows if r is not now)


def test_a_table_without_a_planner_takes_other_batches_to_be_as_fast() -> None:
    table = ThroughputTable(config(), flags(), gpu=("Unheard-of GPU", 1000.0))
    assert "no preset describes" in table.note and "give --copus-cluster" in table.note
    known = {8: (0.5, 0.0, 9)}
    rows, now = rows_of(table, [8, 16, 15], lambda c: known.get(c.global_batch_size))
    assert [(r.global_batch_size, r.source) for r in rows] == [(8, "measured"), (16, "assumed")]
    assert now == rows[0] and rows[1].samples_per_s == 16.0
    # Right after a resume nothing is timed; a schedule of batches goes on all the same.
    rows, now = rows_of(table, [8, 16])
    assert now == rows[0] and [r.global_batch_size for r in rows] == [8, 16]
    assert {(r.samples_per_s, r.source) for r in rows} == {(1.0, "assumed")}
    rows, now = rows_of(table, [8, 16], lambda c: {16: (0.5, 0.0, 9)}.get(c.global_batch_size))
    assert [(r.samples_per_s, r.source) for r in rows] == [(32.0, "assumed"), (32.0, "measured")]


def test_the_user_reads_what_there_is_to_gain_at_the_start_and_with_the_noise_scale(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config()
    rules = rules_of(flags(copus_layouts="all"), run)
    table = ThroughputTable(run, flags(copus_layouts="all"), gpu=None)

    def at_start(notice: HeadroomNotice, consumed_samples: int = 0) -> Headroom | None:
        settings = StepSettings(global_batch_size=8, micro_batch_size=1)
        at = SimpleNamespace(settings=settings, consumed_samples=consumed_samples)
        context: Any = SimpleNamespace(config=run, state=at)
        return notice.at_start(context, table, rules, ControllerState())

    notice = HeadroomNotice()
    found = at_start(notice)
    assert found is not None and found.source == "published" and found.num_layouts > 1
    assert capsys.readouterr().out == f"copus: {found}\n"
    few, many = situation(16, None), situation(16, 60.0)
    said = [notice.at_decision(s) for s in (few, many, few, many)]
    assert [h and h.source for h in said] == ["published", "measured"] * 2
    assert capsys.readouterr().out == f"copus: {said[1]}\n"
    # What cannot be known, or goes wrong, costs nothing but the line.
    assert at_start(HeadroomNotice(), run.batch.train_samples) is None
    monkeypatch.setattr(table, "rows", lambda *a, **b: 1 / 0)
    assert at_start(HeadroomNotice()) is None
    assert capsys.readouterr().out == ""


def test_a_slow_link_between_nodes_is_known_before_anything_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fastest(rate: float | None) -> dict[Layout, float]:
        link = None if rate is None else Link(bytes_per_s=rate)
        table = ThroughputTable(config(), flags(copus_layouts="all"), gpu=None, link=link)
        rows = sorted(rows_of(table, [8])[0], key=lambda r: r.samples_per_s)
        return {r.layout: r.samples_per_s for r in rows}

    dp, pp, tp = Layout(dp=2), Layout(pp=2), Layout(tp=2)
    one = fastest(None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    slow, fast = fastest(1e6), fastest(1e12)
    assert slow[pp] > 2 * slow[dp] and slow[pp] > 2 * slow[tp]
    assert all(fast[x] == pytest.approx(one[x], rel=0.2) for x in (dp, pp, tp))
    assert fastest(None) == fast  # faster than a machine of its kind is taken to be no gain


def test_the_assumed_cost_of_a_change_of_layout() -> None:
    """It grows with the state, falls with the ranks, and with the speed of a link."""
    run = config("--use-distributed-optimizer").replace(padded_vocab_size=512)

    def most(config: Any, link: Link | None = None, **given: Any) -> float:
        machine = machine_of(config, None, link)
        return PausePrior(config, flags(copus_layouts="all", **given), machine).any_s

    plain = most(run)
    assert plain > most(run.replace(data_parallel_size=64)) > sum(FIXED_S.values())
    assert most(run, Link(bytes_per_s=1e12)) == plain
    assert most(run, copus_relayout_cost_s=7.0) == 7.0
    assert most(run, copus_relayout="relaunch") == RELAUNCH_S
    # Other trainers' configurations say nothing of their model's tensors.
    assert most(SimpleNamespace(layout=run.layout, runtime=run.runtime)) == RELAUNCH_S


def test_a_timed_link_between_nodes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    run, to = config().replace(padded_vocab_size=512, data_parallel_size=2), Layout(tp=2)

    def seconds(rate: float) -> float:
        machine = machine_of(run, None, Link(bytes_per_s=rate))
        return PausePrior(run, flags(copus_layouts="all"), machine).to_s(to)

    fast, slow, slower = map(seconds, (1e12, 1e4, 5e3))
    assert slower - fast == pytest.approx(2 * (slow - fast), rel=1e-3)


def test_a_cluster_is_the_one_of_the_run_and_known_by_its_name_or_found(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--copus-cluster h100-80g:8: it has 8 GPUs"):
        ThroughputTable(config(), flags(copus_cluster="h100-80g:8"), gpu=None)
    with pytest.raises(UsageError, match="--copus-profile"):
        ThroughputTable(config(), flags(copus_profile="/no/such/file"), gpu=None)
    found = ThroughputTable(config(), flags(), gpu=("NVIDIA H100 80GB HBM3", 81559.0)).planner
    assert found is not None and found.cluster.gpu == GPUS["H100-80GB"]
    own = replace(preset("cpu:2"), gpu=replace(GPUS["CPU-rank"], fp32_peak_flops=7e9))
    (tmp_path / "own.json").write_text(json.dumps(own.to_json()))
    named = flags(copus_cluster=str(tmp_path / "own.json"))
    found = ThroughputTable(config(), named, gpu=None).planner
    assert found is not None and found.cluster.gpu.fp32_peak_flops == 7e9


@pytest.mark.parametrize("has_links", [False, True])
def test_a_cluster_that_a_flag_describes_follows_the_ranks_of_an_elastic_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    monkeypatch.setenv(GENERATION_VARIABLE, "launch/2")
    text = "h100-80g:16"
    if has_links:
        spec = preset(text).to_json()
        spec["links"] = {"bytes_per_s": [[1e10] * 2] * 2, "latency_s": [[1e-5] * 2] * 2}
        (tmp_path / "cluster.json").write_text(json.dumps(spec))
        text = str(tmp_path / "cluster.json")
    for more, world in (("", 8), ("--global-batch-size 12", 6)):
        table = ThroughputTable(config(more, world=world), flags(copus_cluster=text), gpu=None)
        assert table.cluster is not None and table.cluster.world_size == world


def test_the_journal_which_knows_no_infinity_can_hold_every_setting() -> None:
    for field in fields(CopusConfig):
        if "float" in str(field.type):
            with pytest.raises(UsageError):
                check(flags(**{field.name: math.inf}))


def test_words_for_the_log() -> None:
    stays = decide(situation(16, 64.0, in_ramp=True))
    want = (
        f"copus: batch 16 stays | aims at batch {stays.target_batch:.0f} | considered batch 64 in"
    )
    assert want in decision_line(stays)
    moves = decide(situation(16, 64.0))
    assert "would change batch 16 -> 64; predicted to gain" in decision_line(moves)
    assert "by the published law and 4 times the measured noise scale, which" in moves.reason
    length = length_line(3200, before=400, after=354)
    assert "measured in samples: its 3200 samples now end at step 354 instead of 400" in length
    assert "nothing was changed" in summary([], mode="act")
    assert "observed only" in summary([], mode="observe")
    assert [counted(n, "change") for n in (0, 1, 2)] == ["0 changes", "1 change", "2 changes"]
