"""A layout for the ranks that can be started, if the one asked for does not fit. No torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from copus_ext.controller.flags import CopusConfig
from copus_ext.reshard.relaunch import Request, lost_flags, merged, scheduled_layout, value_of
from megatron.trainer.checkpoint import files
from megatron.trainer.common import optional
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.extras import as_given
from megatron.trainer.config.arguments import parse_args, resolve, with_checkpoint_args
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.training import AUTO

Stored = Callable[[Path], Mapping[str, Any]]
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
_UNEVEN = "--allow-uneven-micro-batches"
_NEEDED = (*_SIZES, "global_batch_size", "micro_batch_size")


class NoFit(ValueError):
    """No layout is legal for the ranks there are; one line."""


class LayoutFit:
    """Finds layouts for a number of ranks, with the batch size of the flags.

    Args:
        flags: of the program, as the user gave them.
        stored: reads the flags of the latest checkpoint in a folder, raising ValueError; slow.
    """

    def __init__(self, flags: Sequence[str], *, stored: Stored, has_gpu: bool = False) -> None:
        self.flags, self._stored, self._has_gpu = list(flags), stored, has_gpu
        self._known: dict[Path, Mapping[str, Any] | None] = {}

    def first_flags(self, ranks: int) -> tuple[list[str], str]:
        """The flags to start with, and a line about them if they are not the user's.

        Flags that cannot be read, or whose fault is not the layout, stay as they are: the program
        says what is wrong with them.

        Raises:
            NoFit: no layout of so many ranks is legal.
        """
        try:
            problem = self._problem(self.flags, ranks)
        except UsageError:
            return self.flags, ""
        if problem is None:
            return self.flags, ""
        prefer = self._layout_of_checkpoint()
        if prefer is None:
            prefer = self._layout_of_flags()
        request, others = self._search(ranks, prefer, _request)
        if request is not None:
            line = f"start {ranks} ranks under {request.layout}: {problem}"
            if lost := lost_flags(self.flags, request):
                line += f"; {lost}"
            return merged(self.flags, request), line
        if others == {problem}:
            return self.flags, ""
        raise NoFit(f"no layout of {ranks} ranks is legal for this model and batch: {problem}")

    def resume_request(
        self,
        ranks: int,
        stored: Mapping[str, Any],
        *,
        layout: Layout | None,
        why: str,
        blocked: Collection[Layout] = (),
    ) -> Request:
        """How to go on from the latest checkpoint in `--save`.

        Args:
            layout: wanted; None for the one of the checkpoint, or the one taken just there.
                Another is chosen if it needs more ranks.
            blocked: layouts that must not be taken later either.

        Raises:
            NoFit: no layout is legal for these ranks.
            ValueError: the checkpoint does not say its layout.
        """
        missing = [name for name in _NEEDED if not isinstance(stored.get(name), int)]
        if missing:
            raise ValueError(f"the checkpoint does not say {missing[0]}")
        wanted = layout or scheduled_layout(stored) or Layout.of_arguments(stored)
        given = as_given(stored, stored)
        batch, micro = given["global_batch_size"], given["micro_batch_size"]
        save = value_of(self.flags, "--save")
        request = partial(_request, batch=batch, checkpoint=save, why=why, stored=stored)
        if wanted.world_size <= ranks:
            sizes = self._sizes(wanted, micro, batch)
            # That of a run that begins under a layout of its own may not fit this one.
            for size in dict.fromkeys([micro, *sizes]):
                found = request(wanted, size)
                flags = merged(self.flags, found, stored=stored, blocked=blocked)
                if self._is_legal(flags, wanted.world_size):
                    return found
            return request(wanted, sizes[0] if sizes else micro)
        found, _ = self._search(
            ranks, wanted, request, batch=batch, micro=micro, stored=stored, blocked=blocked
        )
        if found is None:
            raise NoFit(
                f"{wanted} needs more than {ranks} ranks, and no layout of {ranks} is legal"
            )
        return found

    def _search(
        self,
        ranks: int,
        prefer: Layout,
        request: Callable[[Layout, int], Request],
        *,
        batch: int | None = None,
        micro: int | None = None,
        stored: Mapping[str, Any] = MappingProxyType({}),
        blocked: Collection[Layout] = (),
    ) -> tuple[Request | None, set[str]]:
        """The first legal layout in the order of `layouts_for`, with the largest micro-batch that
        fits, and the problems of those before it."""
        batch = batch or _number(self.flags, "--global-batch-size")
        micro = micro or _number(self.flags, "--micro-batch-size") or 1
        problems = set[str]()
        for layout in layouts_for(ranks, prefer):
            for size in self._sizes(layout, micro, batch) or [micro]:
                found = request(layout, size)
                flags = merged(self.flags, found, stored=stored, blocked=blocked)
                problem = self._problem(flags, ranks)
                if problem is None:
                    return found, problems
                problems.add(problem)
        return None, problems

    def _sizes(self, layout: Layout, micro: int, batch: int | None) -> list[int]:
        """Micro-batch sizes that divide the batch, the largest first; all if it is not known."""
        uneven = _UNEVEN in self.flags and layout.pp == 1

        def fits(b: int) -> bool:
            return not batch or batch % (layout.dp * (1 if uneven else b)) == 0

        return [b for b in range(micro, 0, -1) if fits(b)]

    def _is_legal(self, flags: list[str], ranks: int) -> bool:
        try:
            return self._problem(flags, ranks) is None
        except UsageError:
            return False

    def _problem(self, flags: Sequence[str], ranks: int) -> str | None:
        """The first line that the trainer would say against flags; None if they are right.

        Raises:
            UsageError: they are not those of the trainer.
        """
        args = parse_args(flags, {"copus controller": CopusConfig})
        if args.use_checkpoint_args and args.load:
            args = with_checkpoint_args(args, self._of_checkpoint(Path(args.load)) or {})
        if args.global_batch_size == AUTO:
            args.global_batch_size = None  # the launch finds one that its layout can cut
        try:
            engines = optional.installed() if self._has_gpu else {}
            resolve(args, ranks, cuda_available=self._has_gpu, **engines)
        except UsageError as error:
            return str(error).split("\n")[0]
        return None

    def _layout_of_checkpoint(self) -> Layout | None:
        load = value_of(self.flags, "--load")
        stored = None if load is None else self._of_checkpoint(Path(load))
        if not stored or not all(isinstance(stored.get(name), int) for name in _SIZES):
            return None
        return Layout.of_arguments(stored)

    def _layout_of_flags(self) -> Layout:
        """The sizes that the flags name, with as many replicas as their experts need."""
        names = ("tensor-model", "context", "pipeline-model", "expert-model", "expert-tensor")
        sizes = [_number(self.flags, f"--{name}-parallel-size") for name in names]
        tp, cp, pp, ep = (size or 1 for size in sizes[:-1])
        etp = sizes[-1]
        return Layout(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=ep * (etp or 1))

    def _of_checkpoint(self, load: Path) -> Mapping[str, Any] | None:
        """Its flags, or None if there is none or it cannot be read, which the trainer will say."""
        if load not in self._known:
            self._known[load] = None
            with contextlib.suppress(ValueError, OSError):
                if files.read_latest(load) is not None:
                    self._known[load] = self._stored(load)
        return self._known[load]


def _request(
    layout: Layout,
    micro: int,
    *,
    batch: int | None = None,
    checkpoint: str | None = None,
    why: str = "",
    stored: Mapping[str, Any] = MappingProxyType({}),
) -> Request:
    return Request(
        launch="fit",
        kind="relayout",
        iteration=0,
        consumed_samples=stored.get("consumed_train_samples") or 0,
        reason=why,
        layout=layout,
        micro_batch_size=micro,
        global_batch_size=batch,
        checkpoint=checkpoint,
    )


def layouts_for(ranks: int, prefer: Layout) -> Iterator[Layout]:
    """All layouts of a number of ranks with at most the preferred context parallel size. First come
    the preferred tensor, context and pipeline sizes. Those that cut the model into as many parts or
    more follow, the fewest first, since they are sure to fit the memory. The others come last, the
    most parts first."""
    parts = prefer.tp * prefer.pp
    sizes = [
        (tp, cp, pp)
        for tp in _divisors(ranks)
        for pp in _divisors(ranks // tp)
        for cp in _divisors(math.gcd(prefer.cp, ranks // (tp * pp)))
    ]

    def order(sizes: tuple[int, int, int]) -> tuple[int, ...]:
        tp, cp, pp = sizes
        # A rank keeps activations of 1 / (tp cp) of the tokens.
        is_larger = tp * pp < parts or cp * tp < prefer.cp * prefer.tp
        return is_larger, abs(tp * pp - parts), abs(tp - prefer.tp), -cp

    for tp, cp, pp in sorted(sizes, key=order):
        dp, is_same = ranks // (tp * cp * pp), pp == prefer.pp
        for experts in _expert_sizes(prefer, tp, cp * dp):
            own = {"tp": tp, "cp": cp, "dp": dp, **experts}
            if is_same and prefer.layer_partition:
                yield replace(prefer, **own)
            if is_same and prefer.vpp > 1:
                yield Layout(pp=pp, vpp=prefer.vpp, **own)
            yield Layout(pp=pp, **own)


def _expert_sizes(prefer: Layout, tp: int, copies: int) -> list[dict[str, Any]]:
    """Sizes of experts on so many ranks of a stage: the preferred ones, then smaller expert
    parallel sizes. Those of a dense model are the usual ones."""
    etp = prefer.etp and (prefer.etp if tp * copies % prefer.etp == 0 else 1)
    most = math.gcd(prefer.ep, tp * copies // (etp or tp))
    return [{"ep": ep, "etp": etp} for ep in reversed(_divisors(most))]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _number(flags: Sequence[str], name: str) -> int | None:
    text = value_of(flags, name) or ""
    return int(text) if text.isdecimal() and 0 < int(text) < 1 << 20 else None
