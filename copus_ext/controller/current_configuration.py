"""How a run takes its next step unless something changes."""

from __future__ import annotations

from dataclasses import dataclass

from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.goodput.messages import length_line
from megatron.trainer.config.batch_schedule import steps_for
from megatron.trainer.config.layout import Layout
from megatron.trainer.train.callbacks import CallbackContext


@dataclass(frozen=True, kw_only=True)
class CurrentConfiguration:
    """How the next step is taken unless something changes."""

    layout: Layout
    """Of the job."""
    global_batch_size: int
    """Samples of a step."""
    micro_batch_size: int
    """Samples of a micro-batch."""

    @classmethod
    def of(cls, context: CallbackContext) -> CurrentConfiguration:
        settings, step = context.state.settings, context.step
        assert step is not None
        return cls(
            layout=context.config.layout,
            global_batch_size=settings.global_batch_size or step.global_batch_size,
            micro_batch_size=settings.micro_batch_size or step.micro_batch_size,
        )

    def text_of_length(
        self, context: CallbackContext, to: ConfigThroughput, *, takes_the_rest: bool
    ) -> str:
        """How a change moves the last step of the run; empty if it does not.

        Args:
            context: after a step.
            to: what the run changes to.
            takes_the_rest: whether the last step may be smaller; else a rest that is less than a
                batch is dropped.
        """
        step, total = context.step, context.config.batch.train_samples
        assert step is not None
        old, new = (
            step.iteration
            + steps_for(
                (total - step.consumed_samples) // step.length_ratio,
                batch,
                least=layout.batch_unit if takes_the_rest else batch,
            )
            for batch, layout in (
                (self.global_batch_size, self.layout),
                (to.global_batch_size, to.layout),
            )
        )
        return "" if old == new else length_line(total, before=old, after=new)
