"""The numbers of a step and the lines that Megatron users parse. Pure formatting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

_MAX_PPL_EXPONENT = 20.0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did, or the means over a logging interval; numbers that all ranks agree on."""

    iteration: int
    """Number of the step just finished, from 1."""
    train_iterations: int
    """Steps of the whole run; an estimate while the global batch size still changes."""
    consumed_samples: int
    """Samples used since the start of the run, this step's included."""
    elapsed_per_iteration_ms: float
    """Mean wall time of a step, milliseconds."""
    learning_rate: float
    """Learning rate after this step, that of the next one."""
    global_batch_size: int
    """Samples of this step, all ranks together."""
    losses: Mapping[str, float]
    """Name (`lm loss`) to mean value per token."""
    seq_length: int | None = None
    """Tokens per sample, in a run whose samples become longer."""
    loss_scale: float = 1.0
    """Factor put on the loss before backward; 1 unless fp16."""
    grad_norm: float | None = None
    """Global gradient norm before clipping; None if the step was skipped."""
    num_zeros: int | None = None
    """Zero entries of the gradient, with `--log-num-zeros-in-grad`."""
    params_norm: float | None = None
    """Norm of all weights, with `--log-params-norm`."""
    throughput_tflops_per_gpu: float | None = None
    """Model arithmetic per device, TFLOP/s, with `--log-throughput`."""
    skipped_samples: int = 0
    """Samples passed over by `--iterations-to-skip` since the start of the run."""
    skipped_iterations: int = 0
    """Steps without an update since the last log line."""
    nan_iterations: int = 0
    """Steps with a NaN or infinite loss since the last log line."""


def training_line(report: StepReport, now: datetime, *, more: Sequence[str] = ()) -> str:
    """Returns Megatron's log line, its fields in Megatron's order and widths.

    Args:
        report: means over the interval since the last line.
        more: fields behind Megatron's.
    """
    r = report
    fields = [
        f"iteration {r.iteration:8d}/{r.train_iterations:8d}",
        f"consumed samples: {r.consumed_samples:12d}",
    ]
    if r.skipped_samples > 0:
        fields.append(f"skipped samples: {r.skipped_samples:12d}")
    fields.append(f"elapsed time per iteration (ms): {r.elapsed_per_iteration_ms:.1f}")
    if r.throughput_tflops_per_gpu is not None:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {r.throughput_tflops_per_gpu:.1f}")
    fields.append(f"learning rate: {r.learning_rate:.6E}")
    fields.append(f"global batch size: {r.global_batch_size:5d}")
    if r.seq_length is not None:
        fields.append(f"sequence length: {r.seq_length:6d}")
    fields += [f"{name}: {value:.6E}" for name, value in r.losses.items()]
    fields.append(f"loss scale: {r.loss_scale:.1f}")
    if r.grad_norm is not None:
        fields.append(f"grad norm: {r.grad_norm:.3f}")
    if r.num_zeros is not None:
        fields.append(f"num zeros: {r.num_zeros}")
    if r.params_norm is not None:
        fields.append(f"params norm: {r.params_norm:.3f}")
    fields.append(f"number of skipped iterations: {r.skipped_iterations:3d}")
    fields.append(f"number of nan iterations: {r.nan_iterations:3d}")
    fields += more
    return f" [{now:%Y-%m-%d %H:%M:%S}] " + "".join(f"{field} | " for field in fields).rstrip()


def validation_lines(iteration: int, losses: Mapping[str, float], *, where: str = "") -> list[str]:
    """Returns the validation report: a rule, the line, a rule.

    Args:
        losses: name (`lm loss`) to mean value per token.
        where: words after the iteration, such as `on validation set` at the end of the run.
    """
    title = f" validation loss at iteration {iteration}" + (f" {where}" if where else "")
    fields = [title]
    for name, value in losses.items():
        fields.append(f"{name} value: {value:.6E}")
        fields.append(f"{name} PPL: {perplexity(value):.6E}")
    line = "".join(f"{field} | " for field in fields)
    rule = "-" * (len(line) + 1)
    return [rule, line, rule]


def perplexity(loss: float) -> float:
    """Returns exp(loss), with the exponent held at 20 so that an early loss still prints."""
    return math.exp(min(_MAX_PPL_EXPONENT, loss)) if not math.isnan(loss) else math.nan
