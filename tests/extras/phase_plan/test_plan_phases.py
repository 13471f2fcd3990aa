"""Layouts of a run that grows: stages as the trainer cuts them, the best way, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from copus_ext.commands import plan
from copus_ext.cost_model.cluster_spec import preset
from copus_ext.cost_model.megatron_flags import spec_of_flags
from copus_ext.cost_model.models import PRESETS
from copus_ext.extras.phase_plan import command
from copus_ext.extras.phase_plan.search import (
    Choice,
    PhasePlan,
    RunWide,
    Stage,
    StagePlan,
    choices_of,
    plan_stages,
    stages_of,
    with_own_flags,
)
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import Timing
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.phases.flags import flags_of, number_at, phases_of

SHAPE = """--num-layers 4 --hidden-size 64 --num-attention-heads 8 --max-position-embeddings 1024
--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
--hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 127
--mock-data --lr 1e-3 --eval-iters 0"""
LENGTHS = "0:64 50%:256 65536:1024"
LAYOUTS = [Layout(dp=4), Layout(cp=2, dp=2), Layout(tp=2, dp=2), Layout(pp=2, dp=2)]
WIDE = [RunWide(0, True, 0), RunWide(2, True, 0)]


def run(capsys: pytest.CaptureFixture[str], text: str) -> tuple[int, str, str]:
    code = command.main(shlex.split(text))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("batch", "flags"),
    [
        (16, ""),
        (48, "--rampup-batch-size 16 16 160"),
        (64, "--step-batch-size-schedule '0:16 4096:32 1.2K:48 12000:64'"),
    ],
)
def test_stages_begin_where_the_trainer_changes(batch: int, flags: str) -> None:
    if "1.2K" in flags:
        flags = flags.replace("4096:32 1.2K:48", "1.2K:32 4096:48")
    words = shlex.split(f"{SHAPE} {flags} --global-batch-size {batch} --micro-batch-size 1")
    words += ["--train-samples", "1280", "--seq-length", "64", "--seq-length-schedule", LENGTHS]
    config = resolve(parse_args(words), 1)
    step, ramp = (getattr(config.batch, f"{x}_schedule" if x[0] == "s" else x) for x in (
        "step_batch_size", "rampup_batch_size"
    ))  # fmt: skip
    stages = stages_of(
        seq_length_schedule=LENGTHS,
        train_tokens=1280 * 64,
        global_batch_size=batch,
        step_batch_size_schedule=step,
        rampup_batch_size=ramp,
    )
    heads = {s.phase: s.start_tokens // 64 for s in reversed(stages)}
    assert [heads[n] for n in range(3)] == list(flags_of(config).phase_starts)
    assert [s.seq_length for s in stages] == sorted(s.seq_length for s in stages)
    for before, after in itertools.pairwise(stages):
        assert before.start_tokens + before.tokens == after.start_tokens
    last = stages[-1]
    assert 0 <= 1280 * 64 - last.start_tokens - last.tokens < last.tokens // last.num_steps


def test_iterations_of_a_command_are_steps_of_its_ramp() -> None:
    flags = "--global-batch-size 48 --rampup-batch-size 16 16 160 --seq-length 64"
    words = ["--megatron-args", f"{flags} --train-iters 20"]
    args = command.parser().parse_args(words)
    stages = command.run_asked(args, next(iter(PRESETS.values()))).stages
    assert sum(stage.num_steps for stage in stages) == 20
    assert [stage.global_batch_size for stage in stages] == [16, 32, 48]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_length_schedule": "0:64 10%:96"}, "not a multiple of the first"),
        ({"seq_length_schedule": "0:64 50%:1024"}, "not a whole number of samples"),
        ({"seq_length_schedule": "0:64 50%:128 50%:256"}, "move the positions apart"),
        ({"seq_length_schedule": "10%:64"}, "must begin at position 0"),
        ({"seq_length_schedule": "64", "train_tokens": 64 * 4}, "less than one step"),
        ({"step_batch_size_schedule": "0:4 1K:16"}, "ends at 16"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], words: str) -> None:
    usual = {"seq_length_schedule": "0:64 50%:128", "train_tokens": 8192, "global_batch_size": 8}
    with pytest.raises(UsageError, match=words):
        stages_of(**{**usual, **change})


def stage(number: int, steps: int) -> Stage:
    return Stage(phase=number, seq_length=64, global_batch_size=8, start_tokens=0, num_steps=steps)


def choice(layout: Layout, wide: RunWide, step_s: float) -> Choice:
    c = Configuration(layout=layout, micro_batch_size=1, global_batch_size=8)
    way = ("none", "selective", "full")[wide.recompute]
    return Choice(configuration=dataclasses.replace(c, recompute=way), step_s=step_s)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_plan_is_the_best_of_all(data: st.DataObject) -> None:
    """Every sequence of layouts under every way that stays, and every layout alone."""
    number = data.draw(st.integers(1, 4))
    steps = [data.draw(st.integers(1, 50)) for _ in range(number)]
    times = st.one_of(st.none(), st.floats(0.1, 10))
    table = {
        (k, wide, layout): data.draw(times)
        for k in range(number)
        for wide in WIDE
        for layout in LAYOUTS
    }
    costs = {pair: data.draw(st.floats(0, 60)) for pair in itertools.permutations(LAYOUTS, 2)}
    pause = lambda a, b: 0.0 if a == b else costs[a, b]  # noqa: E731
    choices = []
    for k in range(number):
        some: dict[RunWide, Any] = {}
        for wide, layout in itertools.product(WIDE, LAYOUTS):
            if (step_s := table[k, wide, layout]) is not None:
                some.setdefault(wide, {})[layout] = choice(layout, wide, step_s)
        choices.append(some)
    stages = [stage(k, n) for k, n in enumerate(steps)]
    best, single = plan_stages(stages, choices, pause)
    totals, alone = [], []
    for wide in WIDE:
        for way in itertools.product(LAYOUTS, repeat=number):
            seconds = [table[k, wide, x] for k, x in enumerate(way)]
            if None in seconds:
                continue
            total = sum(n * s for n, s in zip(steps, seconds))  # pyright: ignore[reportOperatorIssue]
            total += sum(pause(a, b) for a, b in itertools.pairwise(way))
            totals.append(total)
            alone += [total] if len(set(way)) == 1 else []
    assert (best is None) == (not totals) and (single is None) == (not alone)
    if best is not None:
        assert best.seconds == pytest.approx(min(totals))
        assert len({s.choice.configuration.recompute for s in best.stages}) == 1
    if single is not None:
        assert single.seconds == pytest.approx(min(alone))
        assert command.cost_of_one(best, single) >= -1e-12  # pyright: ignore[reportOptionalOperand]


def test_a_move_that_cannot_pay_is_not_priced() -> None:
    """Of equal ways the first by name is taken."""
    wide, (own, slow, *_) = WIDE[0], LAYOUTS
    one, other = sorted(LAYOUTS[2:], key=str)
    first = {own: 2.0, slow: 9.0, one: 1.0, other: 1.0}
    choices = [{wide: {x: choice(x, wide, s) for x, s in first.items()}}]
    choices.append({wide: {own: choice(own, wide, 1.0)}})
    asked: list[Layout] = []

    def pause(before: Layout, after: Layout) -> float:
        asked.append(before)
        return 0.0 if before == after else 0.5

    best, _ = plan_stages([stage(0, 1), stage(1, 1)], choices, pause)
    assert best is not None and best.seconds == pytest.approx(2.5)
    assert best.stages[0].choice.configuration.layout == one
    assert slow not in asked and {one, other} <= set(asked)


def test_choices_are_the_fastest_of_each_layout_and_way() -> None:
    limits = Limits(recompute=("none",))
    planner = Planner(
        PRESETS["llama-2-7b"].with_seq_length(2048), preset("h100-80g:16"), limits=limits
    )
    points, seconds = planner.every(64)
    assert len(points) == len(seconds) == planner.rank([64], top=1)[0].num_ranked
    found = choices_of(points, seconds)
    for wide, some in found.items():
        for layout, one in some.items():
            kin = [
                seconds[i]
                for i in range(len(points))
                if (c := points.configuration(i)).layout == layout
                and c.use_distributed_optimizer == wide.use_distributed_optimizer
                and (c.cp_comm_type is None or c.cp_comm_type == one.configuration.cp_comm_type)
            ]
            assert one.step_s == min(kin)
    best = min(one.step_s for some in found.values() for one in some.values())
    assert best == pytest.approx(planner.rank([64], top=1)[0].ranked[0].prediction.step_s)


ASKED = f"""--megatron-args "{SHAPE} --seq-length 64 --train-samples 51200
--seq-length-schedule '0:64 50%:256 90%:1024' --global-batch-size 64" --cluster cpu:4"""


def test_the_command_plans_every_phase(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, ASKED)
    assert code == 0
    lines = out.splitlines()
    lengths = [line.split("  ") for line in lines[1:4]]
    assert all(str(n) in " ".join(row) for n, row in zip((64, 256, 1024), lengths))
    assert any(line.startswith("one layout for all phases costs ") for line in lines)
    assert "the lengths now begin" not in out, "each phase has a length of its own"
    record = json.loads(run(capsys, f"{ASKED} --json")[1])
    stages = record["stages"]
    assert [s["seq_length"] for s in stages] == [64, 256, 1024]
    assert [s["configuration"]["global_batch_size"] for s in stages] == [64, 16, 4]
    total = sum(s["seconds"] + s["pause_s"] for s in stages)
    assert record["seconds"] == pytest.approx(total)
    assert stages[0]["pause_s"] == 0
    for s in stages:
        assert s["seconds"] == pytest.approx(s["num_steps"] * s["step_s"])
    one = record["one_layout"]
    assert one["costs_more"] == pytest.approx(one["seconds"] / record["seconds"] - 1)
    assert one["costs_more"] >= 0


def test_flags_of_a_plan_start_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(run(capsys, f"{ASKED} --json --fix dp=1")[1])
    words = [*shlex.split(SHAPE), "--train-samples", "51200", *record["flags"]]
    config = resolve(parse_args(words), 4)
    asked = [
        Layout.from_json({n: s["configuration"][n] for n in ("tp", "cp", "pp", "vpp", "dp")})
        for s in record["stages"]
    ]
    assert config.layout == asked[0]
    layouts = flags_of(config).phase_layouts or [str(asked[0])] * 3
    assert list(layouts) == [str(x) for x in asked]
    micro = [s["configuration"]["micro_batch_size"] for s in record["stages"]]
    assert list(flags_of(config).phase_micro_batch_sizes) == micro


@pytest.mark.parametrize("text", ["64", "0:64 50%:256"])
@pytest.mark.parametrize("micro", [1, 2])
def test_flags_say_where_the_layout_changes_with_the_batch(text: str, micro: int) -> None:
    """The trainer that gets these flags is in the layout of every stage at its first step."""
    batch = ["--global-batch-size", "64", "--step-batch-size-schedule", "0:16 16384:32 60000:64"]
    stages = stages_of(
        seq_length_schedule=text,
        train_tokens=1280 * 64,
        global_batch_size=64,
        step_batch_size_schedule=batch[-1],
    )
    parts = []
    for s in stages:
        grown = s.global_batch_size * s.seq_length > 16 * 64
        one = choice(LAYOUTS[2] if grown else LAYOUTS[0], WIDE[0], 1.0)
        size = {"micro_batch_size": micro if grown else 1}
        c = dataclasses.replace(one.configuration, global_batch_size=s.global_batch_size, **size)
        parts.append(StagePlan(stage=s, choice=Choice(configuration=c, step_s=1.0), pause_s=0.0))
    flags = with_own_flags(PhasePlan(stages=parts), text, batch)
    note = command.numbers_note(PhasePlan(stages=parts), text)
    # Within the first length the layout changes with the batch, so that the second is phase 2.
    assert note is None if text == "64" else note is not None and "with phases 0, 2," in note
    assert ("--seq-length-schedule" in flags) is (":" in text)
    words = [*shlex.split(SHAPE), "--train-samples", "1280", *flags]
    words += [] if ":" in text else ["--seq-length", "64"]
    config = resolve(parse_args(words), 4)
    assert len(phases_of(config)) == (3 if ":" in text else 2)
    for part in parts:
        at = number_at(flags_of(config).phase_starts, part.stage.start_tokens // 64)
        found, c = phases_of(config)[at], part.choice.configuration
        assert (found.layout, found.micro_batch_size) == (str(c.layout), c.micro_batch_size)
        assert found.seq_length == part.stage.seq_length


def test_each_step_of_a_batch_has_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    base = "--model llama-2-13b --seq-length 2048 --cluster a100-80g:64 --train-tokens 2e10"
    code, out, _ = run(capsys, f"{base} --step-batch-size-schedule '0:16 2.4B:320'")
    assert code == 0 and "--step-batch-size-schedule '0:16 2.4B:320'" in out
    record = json.loads(run(capsys, f"{base} --step-batch-size-schedule '0:16 2.4B:320' --json")[1])
    first, second = record["stages"]
    assert (first["num_steps"], second["start_tokens"]) == (73243, 73243 * 16 * 2048)
    # Alone each has the layout that a search finds for its batch.
    for s in (first, second):
        batch = s["configuration"]["global_batch_size"]
        ways = "--recompute none,selective,full"
        assert (
            plan.main([*shlex.split(f"{base} {ways}"), "--global-batch-size", str(batch), "--json"])
            == 0
        )
        found = json.loads(capsys.readouterr().out)
        best = found["plans"][0]["ranked"][0]["prediction"]["step_s"]
        assert s["step_s"] == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("--model llama-2-7b --seq-length 2048 --cluster h100-80g:8", 2, "one --global-batch-size"),
        (
            "--model llama-2-7b --seq-length 2048 --cluster h100-80g:8 --global-batch-size 8,16",
            2,
            "one --global",
        ),
        (
            "--model llama-2-7b --seq-length 2048 "
            "--cluster h100-80g:8 --global-batch-size 8 --recompute block",
            2,
            "none, selective and full",
        ),
        (
            "--model llama-3-70b --cluster h100-80g:8 --global-batch-size 8 "
            "--seq-length-schedule '0:8192 50%:16384'",
            4,
            "of 8192 tokens",
        ),
        (
            "--model llama-2-7b --seq-length 2048 --cluster h100-80g:8 --global-batch-size 8 "
            "--seq-length-schedule '0:2048 50%:3000'",
            2,
            "not a multiple of the first",
        ),
    ],
)
def test_problems_are_told(
    capsys: pytest.CaptureFixture[str], text: str, code: int, words: str
) -> None:
    got, _, err = run(capsys, text)
    assert got == code and words in err


def test_times_count_for_their_own_length_alone() -> None:
    model = spec_of_flags([*shlex.split(SHAPE), "--seq-length", "64"])
    args = command.parser().parse_args(shlex.split(ASKED))
    usual = plan.planner_of(args)
    c = Configuration(layout=Layout(dp=4), micro_batch_size=1, global_batch_size=64)
    slow = [Timing(configuration=c, step_s=100.0)]
    timed = Planner(model, usual.cluster, timings=slow, limits=usual.limits)
    run_ = command.run_asked(args, usual.model)
    before, _, _ = command.planned(usual, run_)
    after, _, _ = command.planned(timed, run_)
    pairs = list(zip(before.stages, after.stages))
    assert pairs[0][1].choice.step_s > 2 * pairs[0][0].choice.step_s
    for one, other in pairs[1:]:
        # Under whatever layout: as predicted, not as the first length was timed.
        assert other.choice.step_s < 3 * one.choice.step_s


def test_all_phases_have_their_logits_in_as_many_parts(capsys: pytest.CaptureFixture[str]) -> None:
    """The last phase does not fit without, and its price holds for the run as it is started."""
    sizes = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 "
    sizes += "--max-position-embeddings 65536 --position-embedding-type rope --swiglu --bf16 "
    sizes += "--normalization RMSNorm --disable-bias-linear --hidden-dropout 0 "
    sizes += "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 128000"
    code, out, _ = run(
        capsys,
        f"--megatron-args '{sizes}' --cluster a100-40g:8 --global-batch-size 64 "
        "--fix tp=2,cp=1 --seq-length-schedule '0:4096 50%:16384 80%:65536' --train-tokens 1e10 "
        "--json",
    )
    answer = json.loads(out)
    assert code == 0
    parts = [s["configuration"].get("logits_chunks", 1) for s in answer["stages"]]
    assert len(parts) == 3 and len(set(parts)) == 1 and parts[0] > 1
    flags = answer["flags"]
    assert flags[flags.index("--logits-chunks") + 1] == str(parts[0])


@pytest.mark.parametrize("form", ["", "--json", "--output"])
def test_a_plan_of_a_run_says_how_long_the_samples_are(
    form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = "--model copus-quickstart --cluster a100-80g:8 --global-batch-size 32"
    form = form.replace("--output", f"--output {tmp_path / 'plan.txt'}")
    code, _, err = run(capsys, f"{asked} {form}")
    line = "plan-phases: note: samples of 128 tokens, the context of copus-quickstart"
    assert code == 0 and err.splitlines().count(line) == 1


def test_the_word_phases_leads_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["phases", "--model", "llama-2-7b"]) == 2
    assert "use copus plan-phases" in capsys.readouterr().err


def test_flags_and_notes_say_the_software(capsys: pytest.CaptureFixture[str]) -> None:
    asked = "--model llama-2-7b --cluster v100-32g:16 --global-batch-size 64 --train-tokens 1e9"
    code, out, err = run(capsys, asked)
    said = "--fp16 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local"
    assert code == 0 and f"\nflags: {said} --attention-backend unfused --tensor-model" in out
    assert "note: assumed: gradients of 2 bytes, local layers (V100-32GB has no Tr" in err
    flags = json.loads(run(capsys, f"{asked} --json")[1])["flags"]
    assert " ".join(flags).startswith(said)
    assert "assumed" not in run(capsys, ASKED)[2]
