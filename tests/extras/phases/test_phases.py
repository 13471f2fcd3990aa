"""Phases of longer samples: where they begin, what they train with, and what is refused."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.checkpoint.load import Stored
from megatron.trainer.checkpoint.resume import merge_resume_config, resume_step_settings
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve, with_checkpoint_args
from megatron.trainer.config.batch_schedule import BatchSchedule
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.lengths import TrainingLengths
from megatron.trainer.extras.phases.feature import settings_in
from megatron.trainer.extras.phases.flags import flags_of, in_phase, number_at, phase_of, phases_of
from megatron.trainer.extras.phases.resume import in_layout_of_phase
from megatron.trainer.extras.phases.schedule import parse_lengths, parse_phase_data
from tests.helpers.of_extras import of_extra
from tests.unit.test_batch_schedule import schedules

BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --lr 1e-3 --mock-data --position-embedding-type rope"
)
THREE = "0:64 40%:256 75%:1024"


def config_of(flags: str, schedule: str = THREE, world_size: int = 1) -> Config:
    words = [*BASE.split(), *flags.split(), "--seq-length-schedule", schedule]
    words += [] if "--seq-length" in words else ["--seq-length", "64"]
    return resolve(parse_args(words), world_size)


def refusal(flags: str, schedule: str = THREE, world_size: int = 1) -> str:
    with pytest.raises(UsageError) as error:
        config_of(flags, schedule, world_size)
    return str(error.value)


def test_three_phases() -> None:
    config = config_of(
        "--train-iters 20 --global-batch-size 16 --rotary-base-schedule 75%:160000 "
        "--micro-batch-size-schedule 40%:2"
    )
    assert config.batch.seq_length == 64
    found = [
        (p.start, p.end, p.seq_length, p.ratio, p.num_samples, p.rotary_base, p.micro_batch_size)
        for p in phases_of(config)
    ]
    assert found == [
        (0, 128, 64, 1, 128, 10000, 2),
        (128, 240, 256, 4, 28, 10000, 2),
        (240, 320, 1024, 16, 5, 160000, 1),
    ]


def test_positions_in_tokens_and_percent_are_the_same() -> None:
    by_share = config_of("--train-samples 1000 --global-batch-size 16", "0:64 40%:128")
    by_tokens = config_of("--train-samples 1000 --global-batch-size 16", "0:64 25.6K:128")
    assert flags_of(by_share).phase_starts == flags_of(by_tokens).phase_starts == (0, 400)
    # 10,000 tokens are 156.25 samples of 64, and steps have 4.
    config = config_of("--train-iters 99 --global-batch-size 4", "0:64 0.00001B:128")
    assert flags_of(config).phase_starts == (0, 160)


@given(schedules, st.integers(0, 500))
def test_a_boundary_is_the_first_step_boundary_at_or_after(
    schedule: BatchSchedule, asked: int
) -> None:
    consumed = 0
    while consumed < asked:
        consumed += schedule.at(consumed)
    assert schedule.boundary(asked) == consumed


@given(schedules, st.integers(0, 300), st.integers(1, 300))
def test_sizes_between_are_those_of_the_steps(
    schedule: BatchSchedule, start: int, length: int
) -> None:
    wanted = {schedule.at(position) for position in range(start, start + length)}
    assert set(schedule.sizes_between(start, start + length)) == wanted


def test_every_boundary_is_a_step_boundary_of_a_ramp() -> None:
    config = config_of(
        "--train-samples 2000 --global-batch-size 64 --rampup-batch-size 32 32 300", THREE
    )
    schedule = BatchSchedule.of(config)
    consumed, seen = 0, []
    while consumed < 2000:
        seen.append(consumed)
        consumed += schedule.at(consumed)
    assert set(flags_of(config).phase_starts) <= set(seen)
    assert all((p.end - p.start) % p.ratio == 0 for p in phases_of(config)[:-1])


def test_the_phase_of_a_position() -> None:
    starts = (0, 128, 240)
    assert [number_at(starts, n) for n in (0, 127, 128, 239, 240, 400)] == [0, 0, 1, 1, 2, 2]
    assert number_at((), 10**9) == 0


def test_a_run_in_a_phase_has_its_base_and_micro_batch() -> None:
    config = config_of("--train-iters 20 --global-batch-size 16 --rotary-base-schedule 40%:5")
    later = in_phase(config, 1)
    assert later.model.rotary_base == 5 and later.batch.micro_batch_size == 1
    assert later.batch.seq_length == 64 and later.segment.seq_length == 256
    assert in_phase(later, 0) == config
    assert Config.from_flat(later.flat(), later.explicit) == later


def test_lengths_in_samples_are_those_of_a_run_without_phases() -> None:
    flags = "--train-iters 20 --global-batch-size 16 --lr-decay-iters 18 --lr-warmup-iters 3"
    plain = resolve(parse_args([*BASE.split(), *flags.split(), "--seq-length", "64"]), 1)
    phased = config_of(flags)
    assert phased.optim == plain.optim
    assert phased.batch == plain.batch


def test_one_length_is_no_schedule() -> None:
    config = config_of("--train-iters 20 --global-batch-size 16", "0:64")
    assert flags_of(config).phase_starts == () and not phases_of(config)
    assert config.segment.is_whole_run


def test_layouts_of_phases() -> None:
    config = config_of(
        "--train-iters 20 --global-batch-size 32 --layout-schedule 75%:tp2.pp2.dp1 "
        "--micro-batch-size-schedule 40%:2",
        world_size=4,
    )
    assert flags_of(config).phase_layouts == ("tp1.pp1.dp4", "tp1.pp1.dp4", "tp2.pp2.dp1")
    assert [p.layout for p in phases_of(config)][2] == "tp2.pp2.dp1"


@pytest.mark.parametrize(
    ("flags", "schedule", "words"),
    [
        ("", "5%:64 90%:128", "must begin at position 0"),
        ("", "0:64 90%:96", "96 tokens are not a multiple of the first length, 64"),
        ("", "0:64 90%:32", "32 tokens are not a multiple"),
        ("", "0:64 90:", "has the part '90:'"),
        ("", "0:64 90%:many", "has the length 'many'"),
        ("", "", "--seq-length-schedule is empty"),
        ("--seq-length 32", THREE, "give --seq-length 64"),
        ("", "0:64 90%:2048", "raise the latter"),
        ("", "0:64 51%:128 52%:256", "move the positions apart"),
        ("", "0:64 99.9%:128", "has no step"),
        ("--global-batch-size 8", THREE, "make --global-batch-size a multiple of 16"),
        ("--rotary-base-schedule 41%:20000", THREE, "use the same positions"),
        ("--rotary-base-schedule 0:20000", THREE, "make them equal"),
        ("--rotary-base-schedule 40%:0.5", THREE, "give a whole number"),
        ("--rotary-base-schedule 40%:9 --use-rope-scaling", THREE, "--use-rope-scaling"),
        ("--micro-batch-size-schedule 0:1", THREE, "make them equal"),
        ("--micro-batch-size-schedule 40%:3", THREE, "do not divide"),
        ("--layout-schedule 40%:tp2.pp1.dp1", THREE, "give a layout of as many"),
        ("--layout-schedule 40%:many", THREE, "is not a layout"),
        ("--phase-data-path 3: a", THREE, "numbers 1 to 2"),
        ("--phase-data-path 1: a", THREE, "--mock-data"),
        ("--phase-data-path a", THREE, "begin with the number of a phase"),
        ("--phase-data-path 1: 2: a", THREE, "names no data set"),
    ],
)
def test_what_cannot_work_is_refused(flags: str, schedule: str, words: str) -> None:
    batch = "" if "--global-batch-size" in flags else "--global-batch-size 16"
    found = refusal(f"--train-iters 20 {batch} {flags}", schedule)
    assert words in found
    assert len(found.splitlines()) == 1


ALONE = "--seq-length 64 --train-samples 320 --layout-schedule 25%:tp2.pp1.dp1"


def alone(flags: str = "", world_size: int = 2) -> Config:
    """A run whose samples keep their length."""
    return resolve(parse_args(words_of(f"{BASE} {ALONE} {flags}")), world_size)


def words_of(text: str) -> list[str]:
    """The words of a command; what stands behind a flag of a schedule is one."""
    found: list[str] = []
    for word in text.split():
        if not word.startswith("--") and len(found) > 1 and found[-2].endswith("-schedule"):
            found[-1] += f" {word}"
        else:
            found.append(word)
    return found


def test_one_length_begins_no_phase_and_hides_none() -> None:
    plain = alone("--global-batch-size 16")
    config = alone("--global-batch-size 16 --seq-length-schedule 0:64")
    assert flags_of(config).phase_starts == flags_of(plain).phase_starts == (0, 80)
    assert flags_of(config).phase_layouts == flags_of(plain).phase_layouts
    assert any("one length" in note for note in config.runtime.notes)
    # No batch of 3 divides over the first layout, and a later phase has no say in that.
    with pytest.raises(UsageError, match="phase 0 has batches of 3"):
        alone("--global-batch-size 3 --micro-batch-size 1 --seq-length-schedule 0:64")
    for length in ("", "--seq-length-schedule 0:64"):
        with pytest.raises(UsageError, match="--rotary-base-schedule needs --seq-length-schedule"):
            alone(f"{length} --rotary-base-schedule 25%:20000")


def test_layouts_and_micro_batches_may_change_without_lengths() -> None:
    """A ramp of the batch: one layout for each of its stages, at the step boundary."""
    ramp = "--global-batch-size 48 --step-batch-size-schedule"
    words = [*f"{BASE} {ALONE} {ramp}".split(), "0:16 5120:48"]
    words += ["--micro-batch-size-schedule", "5120:3 9216:2"]
    config = resolve(parse_args(words), 2)
    assert flags_of(config).phase_starts == (0, 80, 176)
    found = [(p.seq_length, p.ratio, p.micro_batch_size, p.layout) for p in phases_of(config)]
    one, two = "tp1.pp1.dp2", "tp2.pp1.dp1"
    assert found == [(64, 1, 2, one), (64, 1, 3, two), (64, 1, 2, two)]
    # No batch of the second stage divides over the layout of the first.
    assert BatchSchedule.of(config).sizes == (16, 48)
    odd = [*f"{BASE} {ALONE} --global-batch-size 9".split(), "--step-batch-size-schedule"]
    odd += ["0:16 5120:9", "--micro-batch-size-schedule", "25%:1"]
    assert phases_of(resolve(parse_args(odd), 2))[1].micro_batch_size == 1
    with pytest.raises(UsageError, match="phase 1 has batches of 9"):
        resolve(parse_args(odd[:-2]), 2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--micro-batch-size-schedule 25.1%:1 --global-batch-size 160", "move the positions apart"),
        ("--micro-batch-size-schedule 99%:1 --global-batch-size 16", "has no step"),
        ("--micro-batch-size-schedule 50%:x --global-batch-size 16", "give a whole number"),
        *(
            (f"--global-batch-size 16 {flag} {entries}", f"{flag} .* in ascending order")
            for flag, entries in [
                ("--layout-schedule", "50%:tp2.pp1.dp1 50%:tp1.pp1.dp2"),
                ("--layout-schedule", "50%:tp2.pp1.dp1 10240:tp1.pp1.dp2"),
                ("--layout-schedule", "50%:tp1.pp1.dp2 25%:tp2.pp1.dp1"),
                ("--micro-batch-size-schedule", "0:2 50%:1 50%:2"),
                ("--micro-batch-size-schedule", "0:2 0%:2 50%:1"),
            ]
        ),
    ],
)
def test_what_cannot_work_without_lengths_is_refused(flags: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        alone(flags)
    assert "--seq-length-schedule" not in str(error.value)


def test_a_run_of_one_length_goes_on_with_other_layouts() -> None:
    """No data depend on where its phases begin."""
    stored = stored_at(100, alone("--global-batch-size 16"))
    resumed = merge_resume_config(alone("--global-batch-size 16"), stored, vocab_size=100)
    assert (phase_of(resumed).number, str(resumed.layout)) == (1, "tp2.pp1.dp1")
    later = alone("--global-batch-size 16 --layout-schedule 75%:tp2.pp1.dp1")
    resumed = merge_resume_config(later, stored, vocab_size=100)
    assert flags_of(resumed).phase_starts == (0, 240) and str(resumed.layout) == "tp1.pp1.dp2"
    words = f"{BASE} --seq-length 64 --train-samples 320 --global-batch-size 16".split()
    none = merge_resume_config(resolve(parse_args(words), 2), stored, vocab_size=100)
    assert not phases_of(none)
    stored = stored_at(100, none)
    resumed = merge_resume_config(alone("--global-batch-size 16"), stored, vocab_size=100)
    assert phase_of(resumed).number == 1


def test_another_batch_moves_no_phase_that_has_been_planned() -> None:
    def run(flags: str) -> Config:
        words = f"{BASE} --seq-length 64 --train-iters 20 {flags}"
        return resolve(parse_args(words_of(words)), 2)

    half, batch = "--layout-schedule 50%:tp2.pp1.dp1", "--global-batch-size"
    stored = stored_at(128, run(f"{batch} 16 {half}"))
    config = merge_resume_config(run(f"{batch} 8 {half}"), stored, vocab_size=100)
    assert flags_of(config).phase_starts == (0, 160) and str(config.layout) == "tp1.pp1.dp2"
    # 164 samples are asked for, which end within a step of 16; a step of 8 would end at 168.
    odd = "--layout-schedule 51%:tp2.pp1.dp1"
    stored = stored_at(168, run(f"{batch} 16 {odd}"))
    config = merge_resume_config(run(f"{batch} 8 {odd}"), stored, vocab_size=100)
    assert flags_of(config).phase_starts == (0, 176) and str(config.layout) == "tp1.pp1.dp2"
    # A position that is new counts in the length of the checkpoint and the present batch.
    more = f"{odd} 76%:tp1.pp1.dp2"
    config = merge_resume_config(run(f"{batch} 8 {more}"), stored, vocab_size=100)
    assert flags_of(config).phase_starts == (0, 176, 248)


def test_a_schedule_may_stand_alone() -> None:
    assert [length for _, length in parse_lengths("0:4096 90%:16384 2.4B:65536")] == [
        4096,
        16384,
        65536,
    ]
    assert parse_phase_data(["1:", "long", "2:", "0.7", "books", "0.3", "code"]) == {
        1: ("long",),
        2: ("0.7", "books", "0.3", "code"),
    }


# --- going on from a checkpoint ---

RUN = "--train-iters 20 --global-batch-size 32 --rotary-base-schedule 40%:40000"


def stored_at(consumed_samples: int, config: Config) -> Stored:
    number = number_at(flags_of(config).phase_starts, consumed_samples)
    config = in_phase(config, number).replace(padded_vocab_size=128)
    return Stored(
        folder=Path("saved"),
        iteration=1,
        state=TrainState(iteration=1, consumed_samples=consumed_samples),
        lengths=TrainingLengths.of(config),
        arguments=config.flat(),
        metadata={},
    )


def resumed(
    consumed_samples: int, flags: str = RUN, *, schedule: str = THREE, world_size: int = 1
) -> Config:
    stored = stored_at(consumed_samples, config_of(RUN, world_size=world_size))
    return merge_resume_config(config_of(flags, schedule, world_size), stored, vocab_size=100)


@pytest.mark.parametrize(
    ("consumed", "number", "base"),
    [(0, 0, 10000), (255, 0, 10000), (256, 1, 40000), (479, 1, 40000), (480, 2, 40000)],
)
def test_a_resumed_run_is_in_the_phase_of_its_samples(
    consumed: int, number: int, base: int
) -> None:
    config = resumed(consumed)
    assert phase_of(config).number == number and config.model.rotary_base == base
    assert flags_of(config).phase_starts == (0, 256, 480)


def test_boundaries_are_frozen_at_the_first_launch() -> None:
    other = "--train-samples 640 --global-batch-size 48 --rotary-base-schedule 40%:40000"
    assert flags_of(config_of(other)).phase_starts == (0, 288, 480)
    assert flags_of(resumed(0, other)).phase_starts == (0, 256, 480)


def test_a_resumed_run_takes_the_layout_of_its_phase() -> None:
    layouts = "--layout-schedule 75%:tp2.pp1.dp1"
    assert str(resumed(256, f"{RUN} {layouts}", world_size=2).layout) == "tp1.pp1.dp2"
    assert str(resumed(480, f"{RUN} {layouts}", world_size=2).layout) == "tp2.pp1.dp1"


@pytest.mark.parametrize(
    ("flags", "schedule", "words"),
    [
        (RUN, "0:64 40%:256 80%:1024", "--seq-length-schedule is '0:64 40%:256 80%:1024' but"),
        (RUN, "0:64 40%:512 75%:1024", "give the same value"),
        (RUN.replace("40000", "50000"), THREE, "--rotary-base-schedule is '40%:50000' but"),
        (
            f"{RUN} --override-opt_param-scheduler".replace("-iters 20", "-iters 30"),
            THREE,
            "cannot become 960",
        ),
    ],
)
def test_another_schedule_is_refused(flags: str, schedule: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        resumed(100, flags, schedule=schedule)
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_schedule_in_other_words_is_the_same() -> None:
    assert phase_of(resumed(300, schedule="0:64  40.0%:256 75%:1024")).number == 1


@pytest.mark.parametrize(
    ("flags", "layout", "words"),
    [
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            "tp1.pp2.dp1",
            "--recompute-num-layers 4 is more than the 2 layers",
        ),
        ("--no-overlap-p2p-communication", "tp1.pp2.vpp2.dp1", "--no-overlap-p2p-communication"),
        ("--softmax-type off-by-one", "tp1.cp2.pp1.dp1", "without Transformer Engine"),
        ("--padded-vocab-size 127", "tp2.pp1.dp1", "vocabulary of 127 rows"),
        ("--num-attention-heads 1 --kv-channels 32", "tp2.pp1.dp1", "--num-attention-heads 1"),
    ],
)
def test_a_layout_that_a_phase_could_not_enter_is_refused_at_the_start(
    flags: str, layout: str, words: str
) -> None:
    run = f"--train-iters 20 --global-batch-size 32 {flags} --layout-schedule 75%:{layout}"
    found = refusal(run, world_size=2)
    assert found.startswith(f"--layout-schedule: phase 2 cannot take {layout}: ")
    assert words in found and len(found.splitlines()) == 1


def test_a_layout_that_a_phase_can_enter_is_taken_at_the_start() -> None:
    """Experts under tensor parallelism split activations over the sequence by themselves."""
    experts = "--num-experts 4 --disable-bias-linear --swiglu --layout-schedule 75%:tp2.pp1.dp1"
    config = config_of(f"--train-iters 20 --global-batch-size 32 {experts}", world_size=2)
    assert in_layout_of_phase(in_phase(config, 2)).parallel.sequence_parallel


def test_rows_of_a_checkpoint_must_suit_the_layouts_of_all_phases() -> None:
    stored = stored_at(100, config_of(RUN, world_size=2))
    stored.arguments["padded_vocab_size"] = 127
    config = config_of(f"{RUN} --layout-schedule 75%:tp2.pp1.dp1", world_size=2)
    with pytest.raises(UsageError, match=r"^--layout-schedule: phase 2 .* of 127 rows"):
        merge_resume_config(config, stored, vocab_size=100)


def test_data_of_phases_in_other_words_are_the_same() -> None:
    def of(*words: str) -> Config:
        base = BASE.replace("--mock-data", "--data-path a").split()
        phases = ["--seq-length", "64", "--seq-length-schedule", THREE, "--phase-data-path", *words]
        return resolve(parse_args([*base, *RUN.split(), *phases]), 1)

    stored = stored_at(300, of("1:", "long", "2:", "0.7", "books", "0.3", "code"))
    same = of("1: long 2: 0.7 books", "0.3 code")
    assert phase_of(merge_resume_config(same, stored, vocab_size=100)).number == 1
    with pytest.raises(UsageError, match="--phase-data-path is"):
        merge_resume_config(of("1: long 2: 0.6 books 0.4 code"), stored, vocab_size=100)
    known = dataclasses.replace(stored, data=[])
    moved = of("1: /new/long 2: 0.7 /new/books 0.3 /new/code")
    assert phase_of(merge_resume_config(moved, known, vocab_size=100)).number == 1, "by contents"


def test_phases_begin_with_a_run_and_not_in_one() -> None:
    words = "--train-iters 20 --global-batch-size 32 --seq-length 64"
    plain = resolve(parse_args([*BASE.split(), *words.split()]), 1)
    before = {name: value for name, value in plain.flat().items() if "phase" not in name}
    del before["seq_length_schedule"], before["rotary_base_schedule"]
    for arguments in (plain.flat(), before):
        stored = stored_at(100, plain)
        stored.arguments.clear()
        stored.arguments.update(arguments, padded_vocab_size=128)
        with pytest.raises(UsageError, match=r"was trained with None; .*--finetune"):
            merge_resume_config(config_of(RUN), stored, vocab_size=100)
        fresh = merge_resume_config(config_of(f"{RUN} --finetune"), stored, vocab_size=100)
        assert phase_of(fresh).number == 0


def test_flags_of_a_checkpoint_give_the_first_base() -> None:
    stored = in_phase(config_of(RUN), 1).flat()
    words = [*BASE.split(), *RUN.split(), "--seq-length", "64", "--use-checkpoint-args"]
    words += ["--seq-length-schedule", THREE]
    args: Namespace = with_checkpoint_args(parse_args(words), stored)
    assert args.rotary_base == 10000
    # A program that makes text has no schedule, and wants the present one.
    words = [*BASE.split(), "--seq-length", "64", "--train-iters", "2"]
    assert with_checkpoint_args(parse_args(words), stored).rotary_base == 40000


def test_settings_keep_their_tokens() -> None:
    config = config_of(RUN)
    first, second, third = phases_of(config)
    settings = StepSettings(global_batch_size=96, micro_batch_size=4, lr_factor=0.5)
    later = settings_in(second, first, settings, config)
    assert later == StepSettings(global_batch_size=24, micro_batch_size=1, lr_factor=0.5)
    assert settings_in(third, second, later, config).global_batch_size == 6
    assert settings_in(second, first, StepSettings(), config) == StepSettings()
    # Where no batch has as many tokens, the nearest that the layout can cut.
    odd = settings_in(third, first, StepSettings(global_batch_size=44), config)
    assert odd.global_batch_size == 3


def test_a_resumed_controller_without_batch_takes_that_of_the_phase() -> None:
    config = resumed(300)
    settings, notes = resume_step_settings(StepSettings(lr_factor=0.5), config, keep=True)
    assert settings.lr_factor == 0.5 and not notes


@pytest.mark.parametrize(
    "flags",
    [
        "--global-batch-size 64",
        "--global-batch-size 64 --micro-batch-size-schedule 50%:4",
        "--global-batch-size 64 --rampup-batch-size 32 32 80",
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_checkpoint_names_the_replicas_with_which_a_launch_begins(
    flags: str, number: int
) -> None:
    """In whatever phase it was saved: the flags of a launch are those of the first."""
    schedule, flags = "0:64 50%:256", f"{flags} --train-samples 640"
    stored = in_phase(config_of(flags, schedule), number).flat() | {"padded_vocab_size": 128}
    describe = of_extra("megatron.trainer.extras.inspect_checkpoint.describe")
    named, problems = describe.loads_under(stored)["dp"], []
    for size in range(1, 65):
        try:
            config_of(flags, schedule, size)
        except UsageError as error:
            problems = str(error).splitlines()
            assert size not in named, f"a launch with {size} says: {problems}"
        else:
            assert size in named
    assert 1 in named and 32 not in named and problems
    layouts = of_extra("megatron.trainer.extras.inspect_checkpoint.layouts")
    assert layouts.batch_problems_of(stored, Layout(dp=32)), "a conversion refuses it, too"
