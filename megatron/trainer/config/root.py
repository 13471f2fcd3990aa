"""The whole configuration and its flat form."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron.trainer.common.extras import extras_with
from megatron.trainer.config.checkpoint import CheckpointConfig
from megatron.trainer.config.data import DataConfig
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.logging import LoggingConfig
from megatron.trainer.config.model import KernelConfig, ModelConfig
from megatron.trainer.config.moe import MoeConfig
from megatron.trainer.config.parallel import ParallelConfig, RecomputeConfig
from megatron.trainer.config.runtime import RuntimeConfig
from megatron.trainer.config.segment import Segment, in_segment, segment_of
from megatron.trainer.config.training import BatchConfig, OptimConfig, PrecisionConfig

_OF_CORE: Mapping[str, type] = MappingProxyType(
    {
        "model": ModelConfig,
        "moe": MoeConfig,
        "kernels": KernelConfig,
        "batch": BatchConfig,
        "optim": OptimConfig,
        "precision": PrecisionConfig,
        "parallel": ParallelConfig,
        "recompute": RecomputeConfig,
        "data": DataConfig,
        "checkpoint": CheckpointConfig,
        "logging": LoggingConfig,
        "runtime": RuntimeConfig,
    }
)


@functools.cache
def extra_groups() -> dict[str, type]:
    """Name of each extra that has flags -> their dataclass."""
    return {extra.name: group for extra, group in extras_with("flags")}


class _Groups(Mapping[str, type]):
    """Those of the core, then those of extras. Their modules import this package, so that they are
    looked for when somebody first asks, and not when this module is imported."""

    def __getitem__(self, name: str) -> type:
        return _OF_CORE[name] if name in _OF_CORE else extra_groups()[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*_OF_CORE, *extra_groups()])

    def __len__(self) -> int:
        return len(_OF_CORE) + len(extra_groups())


GROUPS = _Groups()
"""Group name in `Config` or in its `extras` -> its dataclass. No field name is in two groups."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run as it will be done: made by `arguments.resolve`, so derived values are filled in.

    Field names are the argparse dests of Megatron-LM; every length of training, warm-up and decay
    is in samples.
    """

    model: ModelConfig
    """Shape of the model."""
    moe: MoeConfig
    """Mixture of experts."""
    kernels: KernelConfig
    """Implementation and fused kernels."""
    batch: BatchConfig
    """Batches and length of training."""
    optim: OptimConfig
    """Learning rate and optimizer."""
    precision: PrecisionConfig
    """Number formats."""
    parallel: ParallelConfig
    """Layout and communication."""
    recompute: RecomputeConfig
    """Activation recomputation."""
    data: DataConfig
    """Data sets and tokenizer."""
    checkpoint: CheckpointConfig
    """Saving and loading."""
    logging: LoggingConfig
    """Log line and recorders."""
    runtime: RuntimeConfig
    """Device, seed, folders."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Name of an extra -> the values of its flags."""
    explicit: frozenset[str] = frozenset()
    """Field names the user gave on the command line."""

    @property
    def layout(self) -> Layout:
        """The parallel layout of this launch."""
        return Layout.of_arguments(vars(self.parallel))

    @property
    def batch_rules(self) -> dict[str, Any]:
        """How a batch may be cut into micro-batches, as keyword arguments of
        `layout.batch_problems`."""
        return {
            "uneven": self.batch.allow_uneven_micro_batches,
            "group_size": self.parallel.microbatch_group_size_per_vp_stage,
            "arguments": self.flat(),
        }

    @functools.cached_property
    def segment(self) -> Segment:
        """The part of the run that it is in."""
        return segment_of(self)

    @functools.cached_property
    def in_segment(self) -> Config:
        """The same with `batch.seq_length` and all batch sizes of the present segment. Positions
        and lengths of the run stay in samples of `--seq-length`."""
        return in_segment(self)

    def flat(self) -> dict[str, Any]:
        """Returns field name -> value over all groups, with lists for tuples, so that JSON can
        hold it."""
        values: dict[str, Any] = {}
        for name in GROUPS:
            group = self.extras[name] if name in self.extras else getattr(self, name)
            for item in dataclasses.fields(group):
                value = getattr(group, item.name)
                values[item.name] = list(value) if isinstance(value, tuple) else value
        return values

    @classmethod
    def from_flat(cls, values: Mapping[str, Any], explicit: frozenset[str] = frozenset()) -> Config:
        """Builds a configuration from field name -> value; absent fields keep their default.

        Raises:
            ValueError: a name that no group has.
        """
        left = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        groups = {}
        for name, group in GROUPS.items():
            names = [f.name for f in dataclasses.fields(group) if f.name in left]
            groups[name] = group(**{n: left.pop(n) for n in names})
        if left:
            raise ValueError(f"no configuration field is called {', '.join(sorted(left))}")
        of_extras = {name: groups.pop(name) for name in extra_groups()}
        return cls(**groups, extras=of_extras, explicit=explicit)

    def replace(self, **values: Any) -> Config:
        """Returns a copy with some fields changed, named without their group.

        Raises:
            ValueError: a name that no group has.
        """
        return Config.from_flat({**self.flat(), **values}, self.explicit)
