"""The global batch size as a function of consumed samples."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.batch_schedule import BatchSchedule, make_schedule, parse_steps
from megatron.trainer.config.layout import Layout

RAMPS = st.tuples(st.integers(1, 16), st.integers(1, 8), st.integers(0, 20), st.integers(1, 1000))


@given(RAMPS, st.integers(0, 2000))
def test_ramp_follows_the_formula(ramp: tuple[int, int, int, int], consumed: int) -> None:
    start, increment, increments, samples = ramp
    target = start + increment * increments
    schedule = make_schedule(
        global_batch_size=target, rampup_batch_size=(start, increment, samples)
    )
    expected = target
    if increments and consumed <= samples:
        expected = start + increment * int(consumed / Fraction(samples, increments))
    assert schedule.at(consumed) == expected


schedules = st.lists(
    st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=0, max_size=5
).flatmap(
    lambda steps: st.integers(1, 30).map(
        lambda first: BatchSchedule(steps=((0, first), *sorted(dict(steps).items())))
    )
)


@given(schedules, st.integers(0, 300), st.integers(0, 400))
def test_iterations_left_counts_the_walk(
    schedule: BatchSchedule, consumed: int, train_samples: int
) -> None:
    walked, at = 0, consumed
    while at + schedule.at(at) <= train_samples:
        at += schedule.at(at)
        walked += 1
    assert schedule.iterations_left(consumed, train_samples) == walked


def test_iterations_left_of_a_long_run_is_quick() -> None:
    schedule = make_schedule(global_batch_size=1536, rampup_batch_size=(16, 16, 5_859_375))
    assert schedule.iterations_left(0, 10**12) > 10**8


def test_steps_in_tokens() -> None:
    assert parse_steps("0:768 250B:1536", 4096) == ((0, 768), (250 * 10**9 // 4096, 1536))
    assert parse_steps("0:1 1K:2 1.5m:3 2T:4", 1) == (
        (0, 1),
        (1000, 2),
        (1_500_000, 3),
        (2 * 10**12, 4),
    )


@pytest.mark.parametrize(
    "text", ["", "768", "1K:8", "0:8 0:16", "0:8 2K:16 1K:32", "0:0", "0:8 x:9"]
)
def test_bad_steps_name_the_flag(text: str) -> None:
    with pytest.raises(UsageError, match="--step-batch-size-schedule"):
        parse_steps(text, 10)


@pytest.mark.parametrize("ramp", [(0, 1, 10), (2, 0, 10), (2, 4, 10), (16, 2, 10), (2, 2, -1)])
def test_bad_ramps_name_the_flag(ramp: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="--rampup-batch-size"):
        make_schedule(global_batch_size=8, rampup_batch_size=ramp)


def test_contradictions() -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        make_schedule(
            global_batch_size=8, rampup_batch_size=(2, 2, 9), step_batch_size_schedule="0:8"
        )
    with pytest.raises(UsageError, match="--global-batch-size"):
        make_schedule(global_batch_size=4, step_batch_size_schedule="0:8")


@pytest.mark.parametrize(
    "steps", [(), ((1, 4),), ((0, 4), (0, 8)), ((0, 4), (9, 8), (5, 2)), ((0, 0),)]
)
def test_illegal_schedules(steps: tuple) -> None:
    with pytest.raises(ValueError, match="batch"):
        BatchSchedule(steps=steps)


def test_every_size_must_divide() -> None:
    schedule = make_schedule(global_batch_size=16, rampup_batch_size=(4, 4, 100))
    assert schedule.problems(Layout(dp=2), 2) == []
    problems = schedule.problems(Layout(dp=4), 2)
    assert [size for size in (4, 8, 12, 16) if any(f"size {size} " in p for p in problems)] == [
        4,
        12,
    ]


def test_schedule_of_a_config() -> None:
    text = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 10 --lr 1e-3 "
        "--max-position-embeddings 10 --micro-batch-size 1 --train-samples 1000 --mock-data"
    )
    args = [*text.split(), "--step-batch-size-schedule", "0:4 1K:8"]
    config = resolve(parse_args(args), 4)
    assert BatchSchedule.of(config).steps == ((0, 4), (100, 8))
    assert config.batch.global_batch_size == 8
    bad = config.replace(global_batch_size=12, step_batch_size_schedule="0:6 1K:12")
    with pytest.raises(UsageError, match="--global-batch-size 6"):
        BatchSchedule.of(bad)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 400))
def test_so_many_iterations_are_exactly_so_many_steps(
    start: int, increment: int, increments: int, iterations: int
) -> None:
    target = start + increment * increments
    schedule = make_schedule(
        global_batch_size=target, rampup_batch_size=(start, increment, 37 * increments)
    )
    samples = schedule.samples_after(iterations)
    assert schedule.iterations_left(0, samples) == iterations
    assert schedule.samples_after(iterations + 1) - samples == schedule.at(samples)
    assert schedule.samples_after(-3) == -3 * start
