"""The log line as the scripts of Megatron users read it."""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.trainer.logging.log_line import (
    StepReport,
    perplexity,
    training_line,
    validation_lines,
)

NOW = datetime(2025, 3, 4, 5, 6, 7)
USERS_REGEX = re.compile(
    r"^ \[(?P<time>[\d-]+ [\d:]+)\] iteration\s+(?P<iteration>\d+)/\s*(?P<total>\d+) \|"
    r" consumed samples:\s+(?P<samples>\d+) \|"
    r"( skipped samples:\s+(?P<skipped_samples>\d+) \|)?"
    r" elapsed time per iteration \(ms\): (?P<ms>[\d.]+) \|"
    r"( throughput per GPU \(TFLOP/s/GPU\): (?P<tflops>[\d.]+) \|)?"
    r" learning rate: (?P<lr>\S+) \|"
    r" global batch size:\s+(?P<batch>\d+) \|"
    r" lm loss: (?P<loss>\S+) \|"
    r" loss scale: (?P<scale>[\d.]+) \|"
    r"( grad norm: (?P<grad_norm>\S+) \|)?"
    r"( num zeros: (?P<zeros>\d+) \|)?"
    r"( params norm: (?P<params_norm>\S+) \|)?"
    r" number of skipped iterations:\s+(?P<skipped>\d+) \|"
    r" number of nan iterations:\s+(?P<nan>\d+) \|$"
)


def report(**changes: Any) -> StepReport:
    values: dict[str, Any] = dict(
        iteration=1,
        train_iterations=10,
        consumed_samples=16,
        elapsed_per_iteration_ms=1234.56,
        learning_rate=1.5e-4,
        global_batch_size=16,
        losses={"lm loss": 10.83},
        grad_norm=2.5,
    )
    return StepReport(**{**values, **changes})


def test_start_of_line_has_megatrons_widths() -> None:
    start = (
        " [2025-03-04 05:06:07] iteration        1/      10 | consumed samples:           16 |"
        " elapsed time per iteration (ms): 1234.6 | learning rate: 1.500000E-04 |"
        " global batch size:    16 | lm loss: 1.083000E+01 | loss scale: 1.0 | grad norm: 2.500 |"
    )
    assert training_line(report(), NOW).startswith(start)


@given(
    iteration=st.integers(1, 10**8 - 1),
    samples=st.integers(0, 10**12 - 1),
    ms=st.floats(0.1, 1e6),
    loss=st.floats(1e-3, 1e3),
    lr=st.floats(0, 1),
    norm=st.none() | st.floats(0, 1e6),
    tflops=st.none() | st.floats(0, 2e3),
    zeros=st.none() | st.integers(0, 10**12),
    params_norm=st.none() | st.floats(0, 1e6),
    skipped_samples=st.integers(0, 10**6),
    counts=st.tuples(st.integers(0, 999), st.integers(0, 999)),
)
def test_every_number_comes_back_through_the_regex(
    iteration: int,
    samples: int,
    ms: float,
    loss: float,
    lr: float,
    norm: float | None,
    tflops: float | None,
    zeros: int | None,
    params_norm: float | None,
    skipped_samples: int,
    counts: tuple[int, int],
) -> None:
    line = training_line(
        report(
            iteration=iteration,
            consumed_samples=samples,
            elapsed_per_iteration_ms=ms,
            losses={"lm loss": loss},
            learning_rate=lr,
            grad_norm=norm,
            throughput_tflops_per_gpu=tflops,
            num_zeros=zeros,
            params_norm=params_norm,
            skipped_samples=skipped_samples,
            skipped_iterations=counts[0],
            nan_iterations=counts[1],
        ),
        NOW,
    )
    found = USERS_REGEX.match(line)
    assert found, line
    assert int(found["iteration"]) == iteration and int(found["samples"]) == samples
    assert float(found["ms"]) == pytest.approx(ms, abs=0.051)
    assert float(found["loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(found["lr"]) == pytest.approx(lr, rel=1e-6)
    assert (int(found["skipped"]), int(found["nan"])) == counts
    for group, value in (("grad_norm", norm), ("tflops", tflops), ("params_norm", params_norm)):
        assert (found[group] is None) == (value is None)
        if value is not None:
            assert float(found[group]) == pytest.approx(value, abs=0.051)
    assert (found["zeros"] is None) == (zeros is None)
    assert (found["skipped_samples"] is None) == (skipped_samples == 0)


def test_more_fields_come_behind_those_of_megatron() -> None:
    line = training_line(report(), NOW)
    more = training_line(report(), NOW, more=["noise scale (samples): 8.0", "b: 2"])
    assert more == f"{line} noise scale (samples): 8.0 | b: 2 |"
    assert USERS_REGEX.match(line)


def test_validation_lines_are_ruled_and_carry_loss_and_perplexity() -> None:
    top, line, bottom = validation_lines(7, {"lm loss": 2.0}, where="on test set")
    found = re.match(
        r" validation loss at iteration 7 on test set \|"
        r" lm loss value: (\S+) \| lm loss PPL: (\S+) \|",
        line,
    )
    assert found and float(found[1]) == 2.0
    assert float(found[2]) == pytest.approx(math.exp(2.0), rel=1e-6)
    assert top == bottom and set(top) == {"-"} and len(top) > len(line)
    assert " validation loss at iteration 7 | " in validation_lines(7, {"lm loss": 2.0})[1]


@given(st.floats(-50, 1e30))
def test_perplexity_is_finite_and_grows_with_the_loss(loss: float) -> None:
    assert math.isfinite(perplexity(loss))
    assert perplexity(loss) <= perplexity(loss + 1.0)
    assert math.isnan(perplexity(math.nan))
