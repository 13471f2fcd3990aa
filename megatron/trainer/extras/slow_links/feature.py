"""The part of a step that shortens gradients and messages between stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron.trainer.extras.slow_links.powersgd import GradientCompression
from megatron.trainer.extras.slow_links.stage_link import StageLink
from megatron.trainer.train.step_feature import Schedule, StepFeature

if TYPE_CHECKING:
    from megatron.trainer.config import Config
    from megatron.trainer.extras.slow_links.flags import SlowLinksConfig
    from megatron.trainer.model.gpt import Model
    from megatron.trainer.train.job import Job


class SlowLinks(StepFeature):
    """Shorter messages under one layout."""

    def __init__(self, flags: SlowLinksConfig, model: Model, groups: Any) -> None:
        self._flags = flags
        rank, stages = flags.grad_compression_rank, flags.grad_compression_stages
        is_chosen = stages is None or groups.pp.rank() < stages
        self.compression: GradientCompression | None = None
        """Of the reduction over replicas; None where this rank's gradients go whole."""
        if rank and is_chosen and groups.dp_cp.size() > 1:
            self.compression = GradientCompression(model.chunks, rank=rank)
        self.link: StageLink | None = None
        """Carries messages between stages; None where they go whole."""
        is_short = flags.pipeline_message_bits or flags.pipeline_message_rank
        if is_short and groups.pp.size() > 1:
            factors = flags.pipeline_message_rank
            self.link = StageLink(groups.pp, model.core_config, message_rank=factors)

    def begin_schedule(self, job: Job, schedule: Schedule) -> Mapping[str, Any]:
        if self.compression is not None:
            self.compression.is_exact = schedule.is_exact
        if self.link is None:
            return {}
        self.link.begin(
            schedule.num_microbatches,
            is_exact=schedule.is_exact,
            message_bits=self._flags.pipeline_message_bits,
        )
        return {"p2p_communicator": self.link}

    def relayout_bytes(self, config: Config, held: int) -> tuple[float, float]:
        # Residuals; the old ones are gone by then.
        has_residuals = self._flags.grad_compression_rank and config.layout.copies > 1
        return 4.0 * held if has_residuals else 0.0, 0.0

    def remove_hooks(self) -> None:
        self.link = self.compression = None


def slow_links_of(config: Config, model: Model, groups: Any) -> SlowLinks | None:
    """What the flags of the extra ask for; see `Extra.feature`."""
    flags: SlowLinksConfig = config.extras["slow_links"]
    asked = (
        flags.grad_compression_rank,
        flags.pipeline_message_bits,
        flags.pipeline_message_rank,
    )
    return SlowLinks(flags, model, groups) if any(asked) else None
