"""What is printed and recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.trainer.config.fields import option


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The log line, TensorBoard, Weights & Biases, and traces."""

    log_interval: int = option(100)
    """Iterations between two log lines."""
    log_throughput: bool = option(False)
    """Add TFLOP/s per GPU to the log line."""
    log_params_norm: bool = option(False)
    """Add the norm of the weights to the log line."""
    log_num_zeros_in_grad: bool = option(False)
    """Add the number of zeros in the gradient to the log line."""
    tensorboard_dir: str | None = option(None)
    """Folder for TensorBoard."""
    tensorboard_log_interval: int = option(1)
    """Iterations between two TensorBoard points."""
    tensorboard_queue_size: int = option(1000)
    """TensorBoard events to keep before they are written."""
    log_timers_to_tensorboard: bool = option(False)
    """Send iteration time and throughput to TensorBoard and the other sinks."""
    log_validation_ppl_to_tensorboard: bool = option(False)
    """Send validation perplexity to TensorBoard and the other sinks."""
    log_memory_to_tensorboard: bool = option(False)
    """Send memory use to TensorBoard and the other sinks."""
    log_world_size_to_tensorboard: bool = option(False)
    """Send the number of ranks to TensorBoard and the other sinks."""
    wandb_project: str | None = option(None)
    """Weights & Biases project. Turns that record on."""
    wandb_exp_name: str | None = option(None)
    """Weights & Biases run name."""
    wandb_entity: str | None = option(None)
    """Weights & Biases entity."""
    wandb_save_dir: str | None = option(None)
    """Folder for Weights & Biases files."""
    profile: bool = option(False)
    """Write Chrome traces of some steps and of the controller's decisions into traces/ of the run
    directory."""
    profile_step_start: int = option(10)
    """Steps done before the first one that --profile traces."""
    profile_step_end: int = option(12)
    """Steps done after the last one that --profile traces."""
    profile_ranks: tuple[int, ...] = option((0,), nargs="+")
    """Ranks that --profile traces."""
    use_pytorch_profiler: bool = option(False)
    """Accepted. --profile always uses torch's profiler."""
    logging_level: int | None = option(None)
    """Python logging level, such as 10 for debug and 30 for warnings. Default: 20."""


def profile_problems(flags: dict[str, Any]) -> list[str]:
    """Why `--profile` cannot trace what it is asked to, a line each."""
    if not flags["profile"]:
        return []
    start, end = flags["profile_step_start"], flags["profile_step_end"]
    problems = []
    if start < 0:
        problems.append(f"--profile-step-start {start} must be at least 0")
    if end <= start:
        problems.append(f"--profile-step-end {end} must be above --profile-step-start {start}")
    if min(flags["profile_ranks"]) < 0:
        problems.append("--profile-ranks must be at least 0")
    return problems
