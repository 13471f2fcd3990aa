"""The layouts of a run whose samples or batches grow: the best for each stage, and for all.

A stage is a part of a run with one length of samples and one global batch. Between two stages a run
may move to another layout and micro-batch, but what is recomputed, how optimizer state is kept and
how ranks that share samples exchange keys stays, as it does in a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from copus_ext.cost_model.context import CP_COMM_TYPES
from copus_ext.planner.configuration import RECOMPUTE, Configuration
from copus_ext.planner.space import LAYOUT, Candidates
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.batch_schedule import BatchSchedule, make_schedule
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.phases.schedule import parse_lengths

_FASTEST = 8
"""Layouts of a stage that are looked at, beside those of the other stages."""

Pause = Callable[[Layout, Layout], float]
"""Seconds of a change between two layouts; 0 between equal ones, and never below."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    phase: int
    """Number of its length of samples, from 0."""
    seq_length: int
    global_batch_size: int
    """Samples of a step, of this length."""
    start_tokens: int
    """Tokens of the run before it."""
    num_steps: int

    @property
    def tokens(self) -> int:
        return self.num_steps * self.global_batch_size * self.seq_length


def stages_of(
    *,
    seq_length_schedule: str,
    train_tokens: float,
    global_batch_size: int,
    step_batch_size_schedule: str | None = None,
    rampup_batch_size: tuple[int, ...] | None = None,
) -> list[Stage]:
    """Cuts a run into stages, at the step boundaries at which the trainer changes.

    Args:
        seq_length_schedule: as `--seq-length-schedule`; a length alone for one phase.
        global_batch_size: samples of the first length; those of a later phase are as many tokens.
        step_batch_size_schedule: as the flag of that name.
        rampup_batch_size: as the flag of that name, in samples of the first length.

    Raises:
        UsageError: another form, flags that contradict each other, or batches that are no whole
            samples of a later length.
    """
    text = seq_length_schedule
    entries = parse_lengths(text if ":" in text else f"0:{text}")
    first = entries[0][1]
    schedule = make_schedule(
        global_batch_size=global_batch_size,
        rampup_batch_size=rampup_batch_size,
        step_batch_size_schedule=step_batch_size_schedule,
        seq_length=first,
    )
    total = int(train_tokens) // first
    asked = [p.samples(seq_length=first, train_samples=total) for p, _ in entries]
    starts = [schedule.boundary(samples) for samples in asked]
    ends = [*starts[1:], total]
    found: list[Stage] = []
    for number, (start, end) in enumerate(zip(starts, ends)):
        length = entries[number][1]
        if end <= start:
            raise UsageError(
                f"--seq-length-schedule: phase {number} would end where it begins, at "
                f"{start * first} of {total * first} tokens; move the positions apart"
            )
        for size, begin, finish in _pieces(schedule, start, end):
            if size * first % length:
                raise UsageError(
                    f"a batch of {size} samples of {first} tokens is not a whole number of samples "
                    f"of {length}; use a multiple of {length // first}"
                )
            steps = (finish - begin) // size
            if steps:
                found.append(
                    Stage(
                        phase=number,
                        seq_length=length,
                        global_batch_size=size * first // length,
                        start_tokens=begin * first,
                        num_steps=steps,
                    )
                )
    if not found:
        raise UsageError(f"--train-tokens {train_tokens:g} is less than one step; train longer")
    return found


def _pieces(schedule: BatchSchedule, start: int, end: int) -> list[tuple[int, int, int]]:
    """(batch, first sample, end) of each batch size from a step boundary to another."""
    cuts = [schedule.boundary(at) for at, _ in schedule.steps]
    bounds = sorted({start, *(cut for cut in cuts if start < cut < end), end})
    return [(schedule.at(a), a, b) for a, b in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class RunWide:
    recompute: int
    """Code of `rows.RECOMPUTE_*`."""
    use_distributed_optimizer: bool
    """Whether optimizer state is split over the copies of the weights."""
    cp_comm_type: int
    """Index into `CP_COMM_TYPES`, where ranks share samples."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    configuration: Configuration
    """What it runs under."""
    step_s: float
    """Predicted seconds of a step."""


Choices = dict[Layout, Choice]
"""The fastest micro-batch of each layout, in one stage."""


def choices_of(points: Candidates, seconds: Any) -> dict[RunWide, Choices]:
    """The fastest micro-batch of every layout, by what stays through a run. A layout whose ranks
    share no samples goes with every exchange.

    Args:
        points: candidates of one stage, n of them.
        seconds: [n] of a step.
    """
    order = np.argsort(seconds, kind="stable")
    names = (*LAYOUT, "cp_comm_type", "recompute", "use_distributed_optimizer")
    table = np.stack([np.asarray(getattr(points, n)[order], dtype=np.int64) for n in names], axis=1)
    _, first = np.unique(table, axis=0, return_index=True)
    found: dict[RunWide, Choices] = {}
    for i in order[np.sort(first)].tolist():
        c = points.configuration(i)
        own = CP_COMM_TYPES.index(c.cp_comm_type) if c.cp_comm_type else None
        forms = range(len(CP_COMM_TYPES)) if own is None else [own]
        for form in forms:
            wide = RunWide(RECOMPUTE.index(c.recompute), c.use_distributed_optimizer, form)
            choice = Choice(configuration=c, step_s=float(seconds[i]))
            found.setdefault(wide, {}).setdefault(c.layout, choice)
    return found


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """A stage, how it runs, and the move into it."""

    stage: Stage
    choice: Choice
    pause_s: float
    """Seconds of the move into it; 0 where the layout stays."""

    @property
    def seconds(self) -> float:
        return self.stage.num_steps * self.choice.step_s


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    stages: list[StagePlan]
    """In order."""

    @property
    def seconds(self) -> float:
        return sum(s.seconds + s.pause_s for s in self.stages)


def plan_stages(
    stages: Sequence[Stage], choices: Sequence[Mapping[RunWide, Choices]], pause: Pause
) -> tuple[PhasePlan | None, PhasePlan | None]:
    """The fastest run, and the fastest one that keeps one layout; None where there is none.

    Args:
        choices: of each stage, by what stays.

    Returns:
        Both. The first chooses among the fastest layouts of every stage, in each stage that can
        run them.
    """
    best: PhasePlan | None = None
    single: PhasePlan | None = None
    for wide in choices[0]:
        own = [some.get(wide, {}) for some in choices]
        if not all(own):
            continue
        moving = _shortest(stages, own, pause)
        best = moving if best is None or moving.seconds < best.seconds else best
        for layout in set(own[0]).intersection(*own[1:]):
            parts = [StagePlan(stage=s, choice=x[layout], pause_s=0.0) for s, x in zip(stages, own)]
            kept = PhasePlan(stages=parts)
            if single is None or (kept.seconds, str(layout)) < (single.seconds, _name(single)):
                single = kept
    return best, single


def _name(plan: PhasePlan) -> str:
    return str(plan.stages[0].choice.configuration.layout)


def _shortest(stages: Sequence[Stage], choices: Sequence[Choices], pause: Pause) -> PhasePlan:
    """The sequence of layouts whose steps and moves take the least time."""
    fast = [sorted(some, key=lambda x: (some[x].step_s, str(x)))[:_FASTEST] for some in choices]
    named = dict.fromkeys(itertools.chain(*fast))
    # Seconds until the end of a stage under a layout, and the plan so far.
    so_far: dict[Layout, tuple[float, list[StagePlan]]] = {}
    for number, (stage, some) in enumerate(zip(stages, choices)):
        now: dict[Layout, tuple[float, list[StagePlan]]] = {}
        for layout in (x for x in named if x in some):
            before, moved, done = 0.0, 0.0, []
            if number:
                before, come = _arrival(layout, so_far, pause)
                moved, done = pause(come, layout), so_far[come][1]
            part = StagePlan(stage=stage, choice=some[layout], pause_s=moved)
            now[layout] = before + part.seconds, [*done, part]
        so_far = now
    return PhasePlan(stages=min(so_far.values(), key=lambda x: x[0])[1])


def _arrival(
    layout: Layout, so_far: Mapping[Layout, tuple[float, Any]], pause: Pause
) -> tuple[float, Layout]:
    """Seconds until a layout is there, and the layout before it that gives the least; of equal
    ones the first by name. Pauses are slow to price and never negative, so that a layout which is
    already later than the best is not priced."""
    best: tuple[float, str, Layout] | None = None
    for come in sorted(so_far, key=lambda x: (x != layout, so_far[x][0])):
        seconds = so_far[come][0]
        if best is None or seconds <= best[0]:
            way = seconds + pause(come, layout), str(come), come
            best = way if best is None else min(best, way, key=lambda x: x[:2])
    assert best is not None, "a stage has at least one layout"
    return best[0], best[2]


def with_own_flags(plan: PhasePlan, text: str, batch: Sequence[str]) -> list[str]:
    """The trainer's flags of a plan: those of its first stage, and the schedules of lengths,
    layouts and micro-batches. Where only the batch changes and another layout or micro-batch is
    best from there on, the schedules have a position for it.

    Args:
        text: its `--seq-length-schedule`, or a length alone.
    """
    flags = plan.stages[0].choice.configuration.to_flags()
    at = flags.index("--global-batch-size")
    flags[at : at + 2] = batch
    words = text.split() if ":" in text else []
    heads = _heads(plan, words)
    used = [c for *_, c in heads]
    if words:
        flags += ["--seq-length", str(heads[0][2])]
        flags += ["--seq-length-schedule", " ".join(f"{at}:{n}" for _, at, n, _ in heads)]
    layouts = [f"{at}:{c.layout}" for _, at, _, c in heads[1:]]
    micro = [f"{at}:{c.micro_batch_size}" for _, at, _, c in heads[1:]]
    if len({c.layout for c in used}) > 1:
        flags += ["--layout-schedule", " ".join(layouts)]
    if words or len({c.micro_batch_size for c in used}) > 1:
        flags += ["--micro-batch-size-schedule", " ".join(micro)] if micro else []
    # Where a later phase shares samples and the first does not, the exchange is named here.
    form = next((c.cp_comm_type for c in used if c.cp_comm_type), None)
    if form and "--cp-comm-type" not in flags:
        flags += ["--cp-comm-type", form]
    if any(c.sequence_parallel for c in used) and "--sequence-parallel" not in flags:
        flags.append("--sequence-parallel")
    return flags


def first_phases(plan: PhasePlan, text: str) -> list[int]:
    """The number of the trainer's phase with which each length begins, as `--phase-data-path`
    counts them. Phases that change the layout or the micro-batch alone count, too.

    Args:
        text: its `--seq-length-schedule`, or a length alone.
    """
    words = text.split() if ":" in text else []
    found: dict[int, int] = {}
    for number, (length, _, _, _) in enumerate(_heads(plan, words)):
        found.setdefault(length, number)
    return list(found.values())


def _heads(plan: PhasePlan, words: Sequence[str]) -> list[tuple[int, str, int, Configuration]]:
    """Number of the length, position, tokens of a sample and configuration of each phase of a run.
    One begins with each length, and within a length wherever the layout or the micro-batch
    changes."""
    found: list[tuple[int, str, int, Configuration]] = []
    phase, before = None, None
    for part in plan.stages:
        stage, c = part.stage, part.choice.configuration
        at, now = str(stage.start_tokens), (c.layout, c.micro_batch_size)
        if stage.phase != phase and words:
            at = words[stage.phase].partition(":")[0]
        if (stage.phase, now) != (phase, before):
            found.append((stage.phase, at, stage.seq_length, c))
        phase, before = stage.phase, now
    return found
