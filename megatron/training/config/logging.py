"""What is printed and recorded."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.fields import option


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """The log line, TensorBoard, Weights & Biases, and Prometheus."""

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
    """TensorBoard events kept before they are written."""
    log_timers_to_tensorboard: bool = option(False)
    """Send iteration time and throughput to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = option(False)
    """Send validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = option(False)
    """Send memory use to TensorBoard."""
    log_world_size_to_tensorboard: bool = option(False)
    """Send the number of ranks to TensorBoard."""
    wandb_project: str | None = option(None)
    """Weights & Biases project; records there when given."""
    wandb_exp_name: str | None = option(None)
    """Weights & Biases run name."""
    wandb_entity: str | None = option(None)
    """Weights & Biases entity."""
    wandb_save_dir: str | None = option(None)
    """Folder for Weights & Biases files."""
    prometheus_textfile: str | None = option(None)
    """Text file for Prometheus's node_exporter, rewritten at the log interval."""
    logging_level: int | None = option(None)
    """Python logging level, such as 10 for debug and 30 for warnings. Default: 20."""
