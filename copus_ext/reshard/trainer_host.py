"""A job of our own trainer as a change of layout sees it."""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager
from typing import Any

from copus_ext.reshard import saved_state
from copus_ext.reshard.parameters import shape_of
from copus_ext.reshard.plan import ReshardPlan, ReshardPlanCache
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.config import Config
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.model_shape import ModelShape
from megatron.trainer.config.relayout import with_layout
from megatron.trainer.model.gpt import Model, build_model
from megatron.trainer.model.shards import Shards, local_shards
from megatron.trainer.optim.optimizer import build_optimizer
from megatron.trainer.train.build import groups_of, install_layout, release_layout
from megatron.trainer.train.job import Job


@functools.lru_cache(maxsize=1)
def _plans_of(shape: ModelShape, ranks_per_node: int | None) -> ReshardPlanCache:
    return ReshardPlanCache(shape, ranks_per_node=ranks_per_node)


def plan_of(config: Config, layout: Layout) -> ReshardPlan:
    """The plan of a change to a layout. Pure arithmetic; the last few are kept.

    Raises:
        ValueError: the model cannot be laid out so.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None
    return _plans_of(shape_of(config), per_node).between(config.layout, layout)


class TrainerHost:
    """See `LayoutHost`. A target is a `Config`.

    Args:
        job: at a step boundary; the context of a callback is enough for `layout`, `target` and
            `build_groups`.
    """

    def __init__(self, job: Job) -> None:
        self.job = job

    @property
    def layout(self) -> Layout:
        return self.job.config.layout

    @property
    def state(self) -> Any:
        return self.job.state

    @property
    def is_released(self) -> bool:
        return self.job.model is None

    @property
    def present(self) -> tuple[Any, Any, Any, Any]:
        job = self.job
        return job.config, job.model, job.optimizer, job.groups

    def span(self, name: str) -> AbstractContextManager[None]:
        return self.job.trace.span(name)

    def finish_saving(self) -> None:
        if self.job.checkpointer is not None:
            self.job.checkpointer.finish()

    def target(self, layout: Layout) -> Config:
        return with_layout(self.job.config, layout)

    def cut_problems(self, settings: StepSettings, layout: Layout) -> list[str]:
        return self.job.cut_problems(settings, layout)

    def plan(self, layout: Layout) -> ReshardPlan:
        return plan_of(self.job.config, layout)

    def check_memory(self, plan: ReshardPlan | None, target: Config) -> None:
        assert plan is not None
        saved_state.check_memory(self.job, plan, target)

    def shards(self, model: Model, optimizer: Any, groups: Any) -> Shards:
        return local_shards(model, optimizer, groups)

    def release(self) -> None:
        release_layout(self.job)

    def build_groups(self, target: Config) -> Any:
        return groups_of(target)

    def build_model(self, target: Config, groups: Any) -> Model:
        return build_model(target, groups, self.job.device, draw=False)

    def build_optimizer(self, target: Config, model: Model, groups: Any) -> Any:
        return build_optimizer(target, model, groups)

    def install(self, target: Config, groups: Any, model: Model, optimizer: Any) -> None:
        install_layout(self.job, target, groups, model, optimizer)
