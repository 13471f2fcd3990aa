"""The resolved configuration of a run, in groups of frozen dataclasses."""

from megatron.trainer.config.checkpoint import CheckpointConfig
from megatron.trainer.config.data import DataConfig
from megatron.trainer.config.logging import LoggingConfig
from megatron.trainer.config.model import KernelConfig, ModelConfig
from megatron.trainer.config.moe import MoeConfig
from megatron.trainer.config.parallel import ParallelConfig, RecomputeConfig
from megatron.trainer.config.root import GROUPS, Config
from megatron.trainer.config.runtime import RuntimeConfig
from megatron.trainer.config.training import BatchConfig, OptimConfig, PrecisionConfig

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
