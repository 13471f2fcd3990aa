"""What a change of layout asks of a trainer: the contract that both of ours keep, the trainer of
this repository (`trainer_host`) and a user's own Megatron-LM (`copus_ext.megatron_lm`).

Every rank makes the same calls, at a step boundary: gradients are applied, and neither an
evaluation nor a save is under way.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from copus_ext.reshard.plan import ReshardPlan
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.config.layout import Layout
from megatron.trainer.model.shards import Shards


class LayoutHost(Protocol):
    """A job that can be taken to another layout in its own processes.

    A target is how the run is configured under a layout, in whatever form the trainer keeps that;
    it has a `layout`. Parts that are collective say so; no other part waits for another rank.
    """

    @property
    def layout(self) -> Layout:
        """The present one."""
        ...

    @property
    def state(self) -> Any:
        """Counters: `iteration`, `consumed_samples`, and the `settings` of the next steps."""
        ...

    @property
    def is_released(self) -> bool:
        """Whether `release` has been called since the last `install`."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """Tells a trace of a phase."""
        ...

    def finish_saving(self) -> None:
        """Waits for a save that is under way. Collective."""
        ...

    def target(self, layout: Layout) -> Any:
        """How the run is configured under a layout of the same ranks.

        Raises:
            ValueError: the run cannot have it; a line per problem.
        """
        ...

    def cut_problems(self, settings: StepSettings, layout: Layout) -> list[str]:
        """Lists why a layout cannot cut the steps that follow into micro-batches."""
        ...

    def plan(self, layout: Layout) -> ReshardPlan | None:
        """Who sends what in a change to a layout, by arithmetic; None where only the live state of
        both layouts tells."""
        ...

    def check_memory(self, plan: ReshardPlan | None, target: Any) -> None:
        """Compares what this rank needs for the change with what is free.

        Raises:
            MemoryError: with both figures.
        """
        ...

    def shards(self, model: Any, optimizer: Any, groups: Any) -> Shards:
        """The fp32 state that a rank holds of a model and its optimizer; nothing is copied."""
        ...

    @property
    def present(self) -> tuple[Any, Any, Any, Any]:
        """Target, model, optimizer and groups of the present layout."""
        ...

    def release(self) -> None:
        """Lets go of all that belongs to the present layout, so that its groups can be
        destroyed."""
        ...

    def build_groups(self, target: Any) -> Any:
        """New process groups of a layout, while none are in use. Collective."""
        ...

    def build_model(self, target: Any, groups: Any) -> Any:
        """This rank's chunks, with any weights: an object with `chunks` and `detach_hooks()`."""
        ...

    def build_optimizer(self, target: Any, model: Any, groups: Any) -> Any:
        """megatron-core's optimizer, its state allocated. Collective."""
        ...

    def install(self, target: Any, groups: Any, model: Any, optimizer: Any) -> None:
        """Goes on with what was built. Nothing here can refuse the layout any more."""
        ...
