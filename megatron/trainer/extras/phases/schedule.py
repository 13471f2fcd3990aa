"""Reads the flags of phases and freezes where each phase begins."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.batch_schedule import SUFFIXES, BatchSchedule
from megatron.trainer.config.draft import Draft, Environment, flag_of
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.config.lengths import schedule_of

if TYPE_CHECKING:
    from megatron.trainer.config import Config

_ENTRY = re.compile(r"(\d+(?:\.\d+)?)(%|[KMBT]?):(\S+)", re.IGNORECASE)
_NEED_LENGTHS = ("rotary_base_schedule", "phase_data_path")
_MAY_STAND_ALONE = ("layout_schedule", "micro_batch_size_schedule")
_DERIVED = (
    "phase_starts",
    "phase_seq_lengths",
    "phase_rotary_bases",
    "phase_micro_batch_sizes",
    "phase_layouts",
)
_BATCH_FIELDS = (
    "global_batch_size",
    "rampup_batch_size",
    "step_batch_size_schedule",
    "seq_length",
    "train_samples",
    "allow_uneven_micro_batches",
    "microbatch_group_size_per_vp_stage",
)
_PHASE = re.compile(r"(\d+):")


@dataclass(frozen=True)
class Position:
    """A point of a run as it was asked for."""

    amount: Fraction
    """Tokens, or a share of training."""
    is_share: bool
    """Which of the two."""

    def samples(self, *, seq_length: int, train_samples: int) -> int:
        """The first whole sample at or after it."""
        exact = self.amount * train_samples if self.is_share else self.amount / seq_length
        return math.ceil(exact)


def parse_positions(text: str, flag: str) -> list[tuple[Position, str]]:
    """Reads `0:4096 90%:16384 2.4B:65536` into positions and the words behind them.

    Raises:
        UsageError: text of another form, or no text.
    """
    entries = []
    for word in text.split():
        match = _ENTRY.fullmatch(word)
        if match is None:
            raise UsageError(
                f'{flag} "{text}" has the part {word!r}; write a position in tokens (also 2.4B) '
                "or percent, a colon and a value, such as 90%:16384"
            )
        number, unit = Fraction(match[1]), match[2].upper()
        is_share = unit == "%"
        amount = number / 100 if is_share else number * SUFFIXES[unit]
        entries.append((Position(amount, is_share and amount > 0), match[3]))
    if not entries:
        raise UsageError(f"{flag} is empty; give positions and values, or drop it")
    return entries


def parse_lengths(text: str) -> list[tuple[Position, int]]:
    """Reads `--seq-length-schedule`.

    Raises:
        UsageError: another form, no position 0, or lengths that cannot follow one another.
    """
    flag = "--seq-length-schedule"
    entries = parse_positions(text, flag)
    if entries[0][0].amount != 0:
        raise UsageError(f'{flag} "{text}" must begin at position 0; put 0:LENGTH first')
    bad = [word for _, word in entries if not (word.isdecimal() and int(word) > 0)]
    if bad:
        raise UsageError(f'{flag} "{text}" has the length {bad[0]!r}; give a number of tokens')
    lengths = [int(word) for _, word in entries]
    for length in lengths:
        if length % lengths[0] != 0:
            raise UsageError(
                f"{flag}: {length} tokens are not a multiple of the first length, {lengths[0]}; "
                "the first must be the shortest and divide every other one"
            )
    return [(position, int(word)) for position, word in entries]


def parse_phase_data(words: Sequence[str] | None) -> dict[int, tuple[str, ...]]:
    """Reads `1: long_text 2: 0.7 books 0.3 code` into blends by phase number.

    Raises:
        UsageError: a blend without number, or a number without blend.
    """
    blends: dict[int, list[str]] = {}
    present: list[str] | None = None
    for word in (part for text in words or () for part in text.split()):
        match = _PHASE.fullmatch(word)
        if match is not None:
            present = blends.setdefault(int(match[1]), [])
        elif present is None:
            raise UsageError(
                f"--phase-data-path begins with {word!r}; begin with the number of a phase and a "
                "colon, such as 1:"
            )
        else:
            present.append(word)
    empty = [number for number, blend in blends.items() if not blend]
    if empty:
        raise UsageError(f"--phase-data-path {empty[0]}: names no data set; give a prefix after it")
    return {number: tuple(blend) for number, blend in blends.items()}


def has_lengths(text: str | None) -> bool:
    """Whether a `--seq-length-schedule` divides a run into phases. One length alone does not."""
    return text is not None and len(parse_lengths(text)) > 1


def check_phases(draft: Draft, environment: Environment) -> None:
    """Freezes where each phase begins, and notes what phases cannot be; see `Extra.check`."""
    text = draft["seq_length_schedule"]
    if not has_lengths(text):
        idle = [flag_of(name) for name in _NEED_LENGTHS if draft[name] is not None]
        draft.require(
            not idle,
            f"{', '.join(idle)} needs --seq-length-schedule with several lengths; give them, too",
        )
    first = draft["seq_length"] if text is None else parse_lengths(text)[0][1]
    draft.require(
        draft["seq_length"] == first,
        f"--seq-length {draft['seq_length']} differs from the first length of "
        f"--seq-length-schedule, {first}; give --seq-length {first}",
    )
    draft.stop_if_problems()
    _derive(draft, {})


def planned_starts(arguments: Mapping[str, Any]) -> dict[int, int]:
    """Where the phases of a checkpoint begin: the sample that a position of its flags names -> the
    step boundary at which the run has planned the phase. Empty for a run without phases.

    Args:
        arguments: the stored flags and what followed from them.
    """
    starts = arguments.get("phase_starts") or ()
    needed = ("seq_length_schedule", *_MAY_STAND_ALONE, "seq_length", "train_samples")
    draft = Draft(values={name: arguments.get(name) for name in needed}, explicit=frozenset())
    asked: list[int] = []
    with contextlib.suppress(UsageError):
        asked = [samples for samples, _ in _phases_asked(draft)] if starts else []
    return dict(zip(asked, starts, strict=True)) if len(asked) == len(starts) else {}


def schedule_problems(arguments: Mapping[str, Any], layout: Layout) -> list[str]:
    """See `Extra.schedule_problems`. Phases from the first change of --layout-schedule on do not
    count: a launch gives it for its own number of ranks."""
    starts = arguments.get("phase_starts") or ()
    if not has_lengths(arguments.get("seq_length_schedule")) or len(starts) < 2:
        return []
    given = arguments.get("phase_layouts") or [None] * len(starts)
    same = list(itertools.takewhile(lambda text: text == given[0], given))
    values = {name: arguments.get(name) for name in (*_BATCH_FIELDS, *_DERIVED)}
    draft = Draft(values=values, explicit=frozenset())
    _check_batches(draft, schedule_of(draft), [layout] * len(same))
    return list(dict.fromkeys(draft.problems))


def with_planned_starts(config: Config, known: Mapping[int, int]) -> Config:
    """The configuration of a resumed run with its phases where they belong. Those whose position
    its checkpoint knows begin where that has planned them. Others begin at a step boundary of the
    present batch.

    Args:
        config: in its first phase, with the length of training of the checkpoint.
        known: from `planned_starts`.

    Raises:
        UsageError: a phase without a step, or a batch that a phase cannot cut.
    """
    flat = {n: tuple(v) if isinstance(v, list) else v for n, v in config.flat().items()}
    draft = Draft(values=flat, explicit=config.explicit)
    _derive(draft, known)
    draft.stop_if_problems()
    return config.replace(**{name: draft[name] for name in _DERIVED})


def _derive(draft: Draft, known: Mapping[int, int]) -> None:
    """Fills in the derived fields of phases.

    Args:
        known: samples at which a phase is asked for -> samples at which it begins, if that is
            fixed.
    """
    entries = _phases_asked(draft)
    asked, lengths = [samples for samples, _ in entries], tuple(length for _, length in entries)
    text = draft["seq_length_schedule"]
    if text is not None and not has_lengths(text):
        draft.notes.append("--seq-length-schedule has one length and begins no phase")
    if len(lengths) == 1:
        return
    longest, positions = max(lengths), draft["max_position_embeddings"]
    draft.require(
        longest <= positions,
        f"--seq-length-schedule reaches {longest} tokens and --max-position-embeddings is "
        f"{positions}; raise the latter",
    )
    if longest > lengths[0] and draft["position_embedding_type"] == "learned_absolute":
        draft.notes.append(
            f"learned positions from {lengths[0]} on have weight decay and no gradient until a "
            "phase reaches them; --position-embedding-type rope has no such rows"
        )
    schedule = schedule_of(draft)
    starts = _starts(draft, [known.get(n, schedule.boundary(n)) for n in asked], schedule)
    draft.stop_if_problems()
    own = {
        name: _by_phase(draft, name, asked)
        for name in ("rotary_base_schedule", "micro_batch_size_schedule", "layout_schedule")
    }
    draft["phase_starts"], draft["phase_seq_lengths"] = starts, lengths
    draft["phase_rotary_bases"] = _bases(draft, own["rotary_base_schedule"], len(lengths))
    draft["phase_micro_batch_sizes"] = _micro_batches(
        draft, own["micro_batch_size_schedule"], lengths
    )
    layouts = _layouts(draft, own["layout_schedule"], len(lengths))
    draft["phase_layouts"] = tuple(map(str, layouts)) if own["layout_schedule"] else ()
    _check_data(draft, len(lengths))
    draft.stop_if_problems()
    _check_batches(draft, schedule, layouts)


def _phases_asked(draft: Draft) -> list[tuple[int, int]]:
    """The sample that each phase is asked for at, and its tokens per sample. Phases of a run whose
    samples keep their length begin where its schedules of layouts and micro-batches say."""
    text = draft["seq_length_schedule"]
    if has_lengths(text):
        return [(_samples(draft, position), length) for position, length in parse_lengths(text)]
    found = {at for name in _MAY_STAND_ALONE for at, _ in _words_asked(draft, name)}
    return [(samples, draft["seq_length"]) for samples in sorted({0, *found})]


def _words_asked(draft: Draft, name: str) -> list[tuple[int, str]]:
    """The samples and words of a schedule, in order.

    Raises:
        UsageError: positions that do not ascend.
    """
    text, flag = draft[name], flag_of(name)
    if text is None:
        return []
    entries = [(_samples(draft, p), word) for p, word in parse_positions(text, flag)]
    for (before, _), (at, word) in itertools.pairwise(entries):
        if at <= before:
            raise UsageError(
                f'{flag} "{text}": {word} does not stand after the entry before it; give each '
                "position once, in ascending order"
            )
    return entries


def _samples(draft: Draft, position: Position) -> int:
    return position.samples(seq_length=draft["seq_length"], train_samples=draft["train_samples"])


def _check_data(draft: Draft, count: int) -> None:
    numbers = parse_phase_data(draft["phase_data_path"])
    bad = [number for number in numbers if not 1 <= number < count]
    if bad:
        draft.problem(
            f"--phase-data-path {bad[0]}: there is no such phase with data of its own; phases "
            f"have the numbers 1 to {count - 1}, and the first uses --data-path"
        )
    elif numbers and draft["mock_data"]:
        draft.problem("--phase-data-path does not go with --mock-data; drop one of the two")


def _starts(draft: Draft, starts: Sequence[int], schedule: BatchSchedule) -> tuple[int, ...]:
    """Samples consumed where each phase begins, checked: each phase has a step."""
    total = draft["train_samples"]
    given = [flag_of(name) for name in _MAY_STAND_ALONE if draft[name] is not None]
    lengths = draft["seq_length_schedule"]
    flag = "--seq-length-schedule" if has_lengths(lengths) else given[0]
    for number, (before, start) in enumerate(itertools.pairwise(starts), start=1):
        draft.require(
            before < start,
            f"{flag}: phase {number - 1} has no step before sample {start}, where phase {number} "
            "begins; move the positions apart",
        )
    last = starts[-1]
    draft.require(
        last + schedule.at(last) <= total,
        f"{flag}: the last phase begins at sample {last} of {total} and has no step; begin it "
        "earlier, or train longer",
    )
    return tuple(starts)


def _by_phase(draft: Draft, name: str, asked: Sequence[int]) -> dict[int, str]:
    """Phase number -> the word that a schedule of another flag has for it.

    Args:
        asked: samples at which each phase is asked for.
    """
    found = {}
    for at, word in _words_asked(draft, name):
        if at not in asked:
            raise UsageError(
                f'{flag_of(name)} "{draft[name]}": {word} stands where no phase begins; use the '
                "same positions as --seq-length-schedule"
            )
        found[asked.index(at)] = word
    return found


def _whole(word: str, flag: str) -> int:
    if not (word.isdecimal() and int(word) > 0):
        raise UsageError(f"{flag} has the value {word!r}; give a whole number of at least 1")
    return int(word)


def _first_agrees(draft: Draft, flag: str, words: Mapping[int, str], base: str, now: str) -> None:
    draft.require(
        words.get(0, now) == now,
        f"{flag} begins with {words.get(0)} and {base} is {now}; make them equal, or leave "
        "position 0 out",
    )


def _bases(draft: Draft, words: Mapping[int, str], count: int) -> tuple[int, ...]:
    flag = "--rotary-base-schedule"
    if words:
        _first_agrees(draft, flag, words, "--rotary-base", str(draft["rotary_base"]))
        draft.require(
            draft["position_embedding_type"] == "rope",
            f"{flag} needs --position-embedding-type rope; add it or drop the schedule",
        )
        draft.require(
            not draft["use_rope_scaling"],
            f"{flag} does not go with --use-rope-scaling, whose table is made for one base; drop "
            "one of the two",
        )
        draft.require(
            not (draft["multi_latent_attention"] and draft["rope_type"] == "yarn"),
            f"{flag} does not go with --rope-type yarn, whose table is made for one base; use "
            "--rope-type rope",
        )
    bases = [draft["rotary_base"]]
    for number in range(1, count):
        bases.append(_whole(words[number], flag) if number in words else bases[-1])
    return tuple(bases)


def _micro_batches(
    draft: Draft, words: Mapping[int, str], lengths: Sequence[int]
) -> tuple[int, ...]:
    flag, first = "--micro-batch-size-schedule", draft["micro_batch_size"]
    _first_agrees(draft, flag, words, "--micro-batch-size", str(first))
    sizes, tokens = [first], first * lengths[0]
    for number, length in list(enumerate(lengths))[1:]:
        if number in words:
            tokens = _whole(words[number], flag) * length
        sizes.append(max(tokens // length, 1))
    return tuple(sizes)


def _layouts(draft: Draft, words: Mapping[int, str], count: int) -> list[Layout]:
    """The layout of each phase; without a schedule that of the launch. `check_phase_layouts` checks
    them for the model."""
    flag, first = "--layout-schedule", Layout.of_arguments(draft.values)
    layouts = [first]
    for number in range(count):
        if number not in words:
            layouts += [layouts[-1]] if number else []
            continue
        try:
            layout = Layout.from_text(words[number])
        except ValueError as error:
            raise UsageError(f"{flag}: {error}; write it so") from None
        if number == 0:
            draft.require(
                layout == first,
                f"{flag} begins with {layout} and the flags of the layout give {first}; make them "
                "equal, or leave position 0 out",
            )
            continue
        layouts.append(layout)
        if layout.world_size != first.world_size:
            draft.problem(
                f"{flag}: {layout} is for {layout.world_size} ranks and the run has "
                f"{first.world_size}; give a layout of as many"
            )
    return layouts


def _check_batches(draft: Draft, schedule: BatchSchedule, layouts: Sequence[Layout]) -> None:
    """Checks that every batch of the phases is whole samples, and divides over the layout.

    Args:
        layouts: of the first phases; the others are not checked.
    """
    starts, total = draft["phase_starts"], draft["train_samples"]
    lengths, ends = draft["phase_seq_lengths"], [*starts[1:], total]
    for number, (start, end, layout) in enumerate(zip(starts, ends, layouts, strict=False)):
        ratio = lengths[number] // lengths[0]
        micro = draft["phase_micro_batch_sizes"][number]
        for size in schedule.sizes_between(start, end):
            if size % ratio != 0:
                draft.problem(
                    f"a batch of {size} samples of {lengths[0]} tokens is not a whole number of "
                    f"samples of {lengths[number]}; make --global-batch-size a multiple of {ratio}"
                )
                continue
            if batch_problems(
                layout,
                micro,
                size // ratio,
                uneven=draft["allow_uneven_micro_batches"],
                group_size=draft["microbatch_group_size_per_vp_stage"],
            ):
                unit = micro * layout.batch_unit * ratio
                draft.problem(
                    f"phase {number} has batches of {size // ratio} samples of {lengths[number]} "
                    f"tokens, which micro-batches of {micro} on {layout} do not divide; make "
                    f"--global-batch-size a multiple of {unit}, or give the phase a layout with "
                    "less data parallelism by --layout-schedule"
                )
