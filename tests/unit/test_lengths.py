"""Lengths frozen at the first launch and adopted on resume."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.lengths import TrainingLengths, apply_checkpoint_lengths
from megatron.trainer.data.run_data import evaluation_batch

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --lr 1e-3 "
    "--max-position-embeddings 16 --micro-batch-size 1 --mock-data"
)


def config_of(flags: str, batch: int = 8) -> Config:
    return resolve(parse_args(f"{BASE} --global-batch-size {batch} {flags}".split()), 1)


@given(
    st.integers(1, 64),
    st.integers(1, 500),
    st.integers(1, 500),
    st.floats(0, 0.99, exclude_max=True),
)
def test_iterations_become_samples_once(
    batch: int, iters: int, decay: int, fraction: float
) -> None:
    config = config_of(
        f"--train-iters {iters} --lr-decay-iters {decay} --lr-warmup-fraction {fraction}", batch
    )
    assert config.batch.train_samples == iters * batch
    assert config.optim.lr_decay_samples == decay * batch
    assert config.optim.lr_warmup_samples == int(fraction * (decay * batch))
    assert config.batch.initial_global_batch_size == batch


def test_samples_equal_iterations() -> None:
    by_iters = config_of(
        "--train-iters 100 --lr-decay-iters 90 --lr-warmup-iters 10 --lr-decay-style WSD "
        "--lr-wsd-decay-iters 20 --eval-interval 10 --eval-iters 3"
    )
    by_samples = config_of(
        "--train-samples 800 --lr-decay-samples 720 --lr-warmup-samples 80 --lr-decay-style WSD "
        "--lr-wsd-decay-samples 160 --eval-interval 10 --eval-iters 3"
    )
    assert TrainingLengths.of(by_iters) == TrainingLengths.of(by_samples)
    assert TrainingLengths.of(by_iters).eval_samples == (100 // 10 + 1) * 3 * 8


def test_an_evaluation_takes_the_first_batch_or_the_one_of_its_flag() -> None:
    for more, batch in (("", 8), ("--eval-global-batch-size 24", 24)):
        config = config_of(f"--train-iters 100 --eval-interval 10 --eval-iters 3 {more}")
        assert evaluation_batch(config, config.segment) == batch
        assert config.batch.eval_samples == (100 // 10 + 1) * 3 * batch
        stored = TrainingLengths.of(config_of("--train-iters 100", 4))
        resumed = apply_checkpoint_lengths(config, stored, override=True)
        assert evaluation_batch(resumed, resumed.segment) == (batch if more else 4)
    with pytest.raises(UsageError, match="--eval-global-batch-size 0 must be"):
        config_of("--train-iters 100 --eval-global-batch-size 0")


def test_json_round_trip() -> None:
    horizon = TrainingLengths.of(config_of("--train-iters 100"))
    assert TrainingLengths.from_json(json.loads(json.dumps(horizon.to_json()))) == horizon
    with pytest.raises(ValueError, match="keys"):
        TrainingLengths.from_json({"train_samples": 1})


@given(st.integers(1, 64), st.integers(1, 64), st.sampled_from(["fraction 0.1", "iters 10"]))
def test_another_batch_moves_nothing(first: int, second: int, warmup: str) -> None:
    flags = f"--train-iters 100 --lr-decay-iters 80 --lr-warmup-{warmup} --eval-interval 10"
    stored = TrainingLengths.of(config_of(flags, first))
    for override in (False, True):
        resumed = apply_checkpoint_lengths(config_of(flags, second), stored, override=override)
        # A smaller batch means more iterations and so more evaluations; nothing else moves.
        kept = {**TrainingLengths.of(resumed).to_json(), "eval_samples": stored.eval_samples}
        assert kept == stored.to_json()
        assert resumed.batch.global_batch_size == second
        assert resumed.batch.eval_samples >= stored.eval_samples


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("--train-iters 100 --lr-decay-iters 80 --lr-warmup-iters 10", "--train-iters 100"),
        ("--train-iters 100", "--train-samples 800"),
        (
            "--train-iters 100 --lr-decay-iters 80",
            "--train-iters 100 --lr-decay-iters 70 --use-checkpoint-opt_param-scheduler",
        ),
    ],
)
def test_what_is_absent_said_otherwise_or_left_to_it_is_the_checkpoints(
    before: str, now: str
) -> None:
    stored = TrainingLengths.of(config_of(before))
    resumed = apply_checkpoint_lengths(config_of(now, 16), stored, override=False)
    assert TrainingLengths.of(resumed) == stored


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--train-iters 200", ["--train-iters 200", "1600", "800", "--override-opt_param"]),
        ("--train-iters 50", ["--train-iters 50", "400", "800", "--exit-interval"]),
        ("--train-samples 808", ["--train-samples 808", "800", "--override-opt_param-scheduler"]),
        ("--train-iters 100 --lr-decay-iters 70", ["--lr-decay-iters 70", "560", "640"]),
        ("--train-iters 100 --lr-warmup-iters 9", ["--lr-warmup-iters 9", "72", "80"]),
        ("--train-iters 100 --lr-warmup-fraction 0.5", ["--lr-warmup-fraction 0.5", "320", "80"]),
    ],
)
def test_another_meaning_is_refused(flags: str, parts: list[str]) -> None:
    stored = TrainingLengths.of(
        config_of("--train-iters 100 --lr-decay-iters 80 --lr-warmup-iters 10")
    )
    with pytest.raises(UsageError) as error:
        apply_checkpoint_lengths(config_of(flags), stored, override=False)
    (line,) = str(error.value).split("\n")
    for part in parts:
        assert part in line


RAMP = "--rampup-batch-size 2 2 24 --eval-iters 0 --lr-decay-style WSD"


def test_iterations_of_a_ramp_are_steps_of_it_also_on_resume() -> None:
    # 2 x 4, 4 x 2, 6 x 2, then 8.
    flags = f"{RAMP} --train-iters 20 --lr-warmup-iters 5 --lr-wsd-decay-iters 13"
    config = config_of(flags)
    stored = TrainingLengths.of(config)
    assert (stored.train_samples, stored.lr_decay_samples) == (28 + 12 * 8, 28 + 12 * 8)
    assert (stored.lr_warmup_samples, stored.lr_wsd_decay_samples) == (12, 6 + 12 * 8)
    (note,) = [note for note in config.runtime.notes if "count the steps" in note]
    assert note == (
        "iterations count the steps of --rampup-batch-size: --train-iters 20 is 124 samples, "
        "--lr-warmup-iters 5 is 12 samples, --lr-wsd-decay-iters 13 is 102 samples"
    )
    for override in (False, True):
        again = apply_checkpoint_lengths(config_of(flags), stored, override=override)
        assert TrainingLengths.of(again) == stored
    with pytest.raises(UsageError, match="--lr-warmup-iters 6 = 16 samples differs from the 12"):
        apply_checkpoint_lengths(
            config_of(flags.replace("warmup-iters 5", "warmup-iters 6")), stored, override=False
        )


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ("--global-batch-size 16 --train-iters 100", "is 16 and was 8 at the first launch"),
        ("--micro-batch-size 4 --train-samples 800", "is 4 and was 8 at the first launch"),
        ("--global-batch-size 8 --train-iters 100", None),
    ],
)
def test_a_resume_with_another_batch_says_what_the_lengths_are(now: str, words: str | None) -> None:
    stored = TrainingLengths.of(config_of("--train-iters 100 --lr-warmup-iters 10"))
    words_of_launch = f"{BASE.replace('--micro-batch-size 1 ', '')} --eval-iters 3 {now}"
    if "--micro-batch-size" not in now:
        words_of_launch += " --micro-batch-size 1"
    config = resolve(parse_args(words_of_launch.split()), 1)
    notes = apply_checkpoint_lengths(config, stored, override=False).runtime.notes
    told = [note for note in notes if "was 8 at the first launch" in note]
    if words is None:
        assert not told
        return
    (line,) = told
    assert words in line and "the run trains 800 samples, warms up over 80" in line
    assert line.endswith("decays over 800; an evaluation is of 24")


def test_override_takes_the_new_horizon() -> None:
    stored = TrainingLengths.of(
        config_of("--train-iters 100 --lr-decay-iters 80 --lr-warmup-iters 10")
    )
    asked = config_of("--train-iters 200 --lr-warmup-iters 5", 16)
    resumed = apply_checkpoint_lengths(asked, stored, override=True)
    # Iterations keep the unit of the first launch, 8 samples.
    assert resumed.batch.train_samples == 1600
    assert resumed.optim.lr_decay_samples == 1600
    assert resumed.optim.lr_warmup_samples == 40
    assert any("800" in note and "1600" in note for note in resumed.runtime.notes)


def test_override_never_shortens_the_data() -> None:
    stored = TrainingLengths.of(config_of("--train-iters 100"))
    with pytest.raises(UsageError, match="--exit-interval"):
        apply_checkpoint_lengths(config_of("--train-iters 99"), stored, override=True)


def test_adopting_twice_changes_nothing() -> None:
    stored = TrainingLengths.of(config_of("--train-iters 100 --lr-warmup-fraction 0.1"))
    once = apply_checkpoint_lengths(
        config_of("--train-iters 100 --lr-warmup-fraction 0.1", 32), stored, override=False
    )
    assert apply_checkpoint_lengths(once, stored, override=False) == once
