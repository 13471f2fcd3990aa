"""The layout and the batch with which a run goes on when the number of its ranks changes.

The batch stays if some layout of so many ranks allows it. It may move a little, where that makes a
faster layout possible: the same batch on one rank less often fits few layouts, all of them slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.throughput_table import ThroughputTable, gpu_of
from copus_ext.launch.layout_fit import NoFit, layouts_for
from copus_ext.reshard.relaunch import Request, merged, value_of, without_start
from megatron.trainer.common import optional
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.extras import as_given
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve, with_checkpoint_args
from megatron.trainer.config.layout import Layout

BATCH_CHANGE = 0.02
"""Share by which the batch may move for a faster layout; more only where nothing else is legal.
The noise of a gradient does not tell batches apart that differ by so little."""
_TRIED = 64


@dataclass(frozen=True, kw_only=True)
class Choice:
    flags: list[str]
    config: Config
    replaced: tuple[int, int] | None = None
    """The batch that these ranks could not have, and the one in its place; None where it stays."""

    @property
    def note(self) -> str:
        """What the user should know; empty if only the layout is another."""
        return "" if self.replaced is None else "batch {1} instead of {0}".format(*self.replaced)


def choose(
    flags: Sequence[str],
    stored: Mapping[str, Any],
    ranks: int,
    *,
    has_gpu: bool,
    why: str,
    replaced: tuple[int, int] | None = None,
) -> Choice:
    """The fastest legal configuration of so many ranks, as predicted; without a prediction the
    first in the order of `layouts_for`.

    Args:
        flags: of the program, as the user gave them.
        stored: flags of the state to go on from, as a checkpoint holds them.
        ranks: all of them are used.
        why: one line for the record.
        replaced: as the last choice said; its first batch comes again as soon as it can, unless
            something else has set the batch since.

    Raises:
        NoFit: no batch and layout are legal.
    """
    wanted, present = replaced or (0, 0)
    batch = wanted if present == stored["global_batch_size"] else stored["global_batch_size"]
    search = _Search(without_start(flags), stored, ranks, batch=batch, has_gpu=has_gpu, why=why)
    first = search.first_legal()
    return search.fastest(first.config) or first


class _Search:
    """Looks for configurations of a number of ranks; see `choose`."""

    def __init__(
        self,
        flags: list[str],
        stored: Mapping[str, Any],
        ranks: int,
        *,
        batch: int,
        has_gpu: bool,
        why: str,
    ) -> None:
        self._flags, self._stored, self._ranks = flags, stored, ranks
        self._has_gpu, self._why = has_gpu, why
        self._batch = batch
        self._micro = as_given(stored, stored)["micro_batch_size"]

    def first_legal(self) -> Choice:
        """The nearest batch, and for it the first layout.

        Raises:
            NoFit: there is none.
        """
        layouts = list(layouts_for(self._ranks, Layout.of_arguments(self._stored)))
        for batch in self._by_distance(range(1, self._batch + self._ranks + 1)):
            for layout in layouts:
                for micro in range(self._micro, 0, -1):
                    if batch % (layout.dp * micro) == 0:
                        if (found := self._try(layout, micro, batch)) is not None:
                            return found
                        break
        raise NoFit(f"no layout of {self._ranks} ranks is legal for this model")

    def fastest(self, config: Config) -> Choice | None:
        """The legal configuration with the least predicted time of a sample, given any legal one;
        None where nothing predicts it."""
        with contextlib.suppress(UsageError, ValueError, ArithmeticError):
            config = config.replace(padded_vocab_size=self._stored.get("padded_vocab_size"))
            table = ThroughputTable(config, CopusConfig(), gpu=gpu_of(config))
            if table.planner is None:
                return None
            plans = table.planner.rank(self._near_batches(), top=_TRIED)
            ranked = [one.configuration for plan in plans for one in plan.ranked]
            seconds = [one.prediction.step_s for plan in plans for one in plan.ranked]
            order = sorted(
                range(len(ranked)),
                key=lambda i: (
                    seconds[i] / ranked[i].global_batch_size,
                    abs(ranked[i].global_batch_size - self._batch),
                ),
            )
            for i in order:
                c = ranked[i]
                if c.micro_batch_size <= self._micro:
                    found = self._try(c.layout, c.micro_batch_size, c.global_batch_size)
                    if found is not None:
                        return found
        return None

    def _near_batches(self) -> list[int]:
        """The batch that is wanted, and for every number of replicas the nearest they divide."""
        batch = self._batch
        nearest = {
            round(batch / dp) * dp for dp in range(1, self._ranks + 1) if self._ranks % dp == 0
        }
        return self._by_distance(
            b for b in {batch, *nearest} if b > 0 and abs(b - batch) <= BATCH_CHANGE * batch
        )

    def _by_distance(self, batches: Iterable[int]) -> list[int]:
        """The nearest to the wanted one first, the larger of two."""
        return sorted(batches, key=lambda b: (abs(b - self._batch), -b))

    def _try(self, layout: Layout, micro: int, batch: int) -> Choice | None:
        stored = self._stored
        request = Request(
            launch="elastic",
            kind="relayout",
            iteration=0,
            consumed_samples=stored.get("consumed_train_samples") or 0,
            reason=self._why,
            layout=layout,
            micro_batch_size=micro,
            global_batch_size=batch,
            checkpoint=value_of(self._flags, "--save"),
        )
        flags = merged(self._flags, request, stored=stored)
        with contextlib.suppress(UsageError):
            args = parse_args(flags, {"copus controller": CopusConfig})
            if args.use_checkpoint_args:
                args = with_checkpoint_args(args, stored)
            engines = optional.installed() if self._has_gpu else {}
            config = resolve(args, self._ranks, cuda_available=self._has_gpu, **engines)
            replaced = None if batch == self._batch else (self._batch, batch)
            return Choice(flags=flags, config=config, replaced=replaced)
        return None
