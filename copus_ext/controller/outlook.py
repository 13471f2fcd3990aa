"""What the controller looks at before it decides: the configurations of the present layout and of
others, their speeds, and where the run stands. On rank 0 alone."""

from __future__ import annotations

from copus_ext.controller import rules as flags_to_rules
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.link_timing import Link
from copus_ext.controller.throughput_table import Table, gpu_of
from copus_ext.gns.observer import NoiseObserver
from copus_ext.goodput.costs import Costs
from copus_ext.goodput.inputs import DecisionInputs, Rules
from copus_ext.goodput.standing import standing
from copus_ext.goodput.state import History, key_of
from copus_ext.planner.configuration import Configuration
from megatron.training.common.control import PAUSE_FILE
from megatron.training.config.layout import Layout
from megatron.training.train.callbacks import CallbackContext


class Outlook:
    """Sees one layout of a run.

    Args:
        context: of the run under that layout.
        flags: of the controller.
        rules: of its decisions there.
        fixed_micro_batch: whether the micro-batch of the flags must stay.
        link: between nodes, as timed.
        home: layout of the flags, the only one whose stages may be uneven; None: the present one.

    Raises:
        UsageError: a cluster or a profile that cannot be used.
    """

    def __init__(
        self,
        context: CallbackContext,
        flags: CopusConfig,
        rules: Rules,
        *,
        fixed_micro_batch: bool,
        link: Link | None = None,
        home: Layout | None = None,
    ) -> None:
        self._run_dir, self._rules, self._flags = context.run_dir, rules, flags
        self.table = Table(
            context.config,
            flags,
            gpu=gpu_of(context.config),
            fixed_micro_batch=fixed_micro_batch,
            link=link,
            home=home,
        )

    @property
    def is_paused(self) -> bool:
        """Whether an operator has stopped decisions."""
        return self._run_dir is not None and (self._run_dir / PAUSE_FILE).exists()

    def situation(
        self,
        context: CallbackContext,
        history: History,
        observer: NoiseObserver,
        costs: Costs,
        *,
        is_paused: bool,
    ) -> DecisionInputs:
        """Where the run stands.

        Args:
            context: after a step.
            history: its record.
            observer: of the noise scale.
            costs: of changing the layout.
            is_paused: whether an operator has stopped decisions.
        """
        config, state, step = context.config, context.state, context.step
        assert step is not None
        batch = state.settings.global_batch_size or step.global_batch_size
        rows, current = self.table.rows(
            flags_to_rules.batches_to_weigh(self._rules, batch),
            micro_batch_size=state.settings.micro_batch_size or step.micro_batch_size,
            global_batch_size=batch,
            measured=lambda c: history.median_s(_key(c)),
            visited=self._visited(history, config.layout.world_size),
        )
        warming = state.lr_samples < config.optim.lr_warmup_samples
        decayed = step.learning_rate / state.settings.lr_factor / (config.optim.lr or 1.0)
        return standing(
            self._rules,
            rows=rows,
            current=current,
            layout=config.layout,
            history=history,
            observer=observer,
            costs=costs,
            iteration=step.iteration,
            consumed_samples=step.consumed_samples,
            total_samples=config.batch.train_samples,
            in_warmup=warming,
            lr_decay_factor=1.0 if warming or not decayed else min(decayed, 1.0),
            paused=is_paused,
        )

    def _visited(self, history: History, world_size: int) -> list[Layout]:
        """Other layouts that were timed and may be chosen."""
        if self._flags.copus_layouts == "current":
            return []
        return [layout for layout in history.layouts if layout.world_size == world_size]


def _key(c: Configuration) -> str:
    return key_of(str(c.layout), c.micro_batch_size, c.global_batch_size)
