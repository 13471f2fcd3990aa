"""The resolved configuration of a run, in groups of frozen dataclasses."""

from megatron.training.config.checkpoint import CheckpointConfig
from megatron.training.config.data import DataConfig
from megatron.training.config.logging import LoggingConfig
from megatron.training.config.model import KernelConfig, ModelConfig
from megatron.training.config.moe import MoeConfig
from megatron.training.config.parallel import ParallelConfig, RecomputeConfig
from megatron.training.config.root import GROUPS, Config
from megatron.training.config.runtime import RuntimeConfig
from megatron.training.config.training import BatchConfig, OptimConfig, PrecisionConfig

__all__ = [
    "GROUPS",
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "KernelConfig",
    "LoggingConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "RuntimeConfig",
]
