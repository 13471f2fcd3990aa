"""What a run asks of its supervisor as it ends, and the flags of the launch that follows.

    <run>/control/request.json    written by rank 0 after all ranks agreed and the checkpoint is
                                  committed; replaced atomically; a request of another launch is
                                  stale

Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

from copus_ext.reshard.checked import (
    MAX_NUMBER,
    JsonRecord,
    check_number,
    check_text,
    one_line,
    read_value,
    shown,
)
from megatron.trainer.checkpoint.files import TRACKER, write_atomically
from megatron.trainer.common.control import LAUNCH_NAME, supervised_launch
from megatron.trainer.common.control import LAUNCH_VARIABLE as LAUNCH_VARIABLE
from megatron.trainer.common.errors import Relaunch
from megatron.trainer.common.extras import extras_with
from megatron.trainer.config import layer_partition
from megatron.trainer.config.layout import Layout
from megatron.trainer.resilience.exit_status import RunOutcome

logger = logging.getLogger(__name__)

REQUEST_FILE = Path("control") / "request.json"
Kind = Literal["done", "relayout", "requeue", "abort"]
BLOCKED_VARIABLE = "COPUS_BLOCKED_LAYOUTS"
"""Environment variable: layouts that the run must not choose, such as tp2.pp1.dp4, separated by
commas."""
_MAX_REASON, _MAX_TEXT = 2000, 4096
_MAX_SIZE = 1 << 20
_OPEN_NUMBERS = ("micro_batch_size", "global_batch_size")
"""Fields of a request that are at least 1 if they are given."""

_TENSOR = "--tensor-model-parallel-size"
_CONTEXT = "--context-parallel-size"
_LEVELS, _EXCHANGE = "--hierarchical-context-parallel-sizes", "--cp-comm-type"
_PIPELINE = "--pipeline-model-parallel-size"
_EXPERT = "--expert-model-parallel-size"
_EXPERT_TENSOR = "--expert-tensor-parallel-size"
_LAYERS_OF_CHUNK = "--num-layers-per-virtual-pipeline-stage"
_CHUNKS = "--num-virtual-stages-per-pipeline-rank"
_CUT_FLAGS = (
    layer_partition.FLAG,
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
_COUNTED_IN_CUT = (
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_MICRO, _GLOBAL = "--micro-batch-size", "--global-batch-size"
_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
_LOAD, _SAVE, _STEP = "--load", "--save", "--ckpt-step"
_ANOTHER_START = ("--finetune", "--no-load-optim", "--no-load-rng")
_SEQUENCE = "--sequence-parallel"
_NO_OVERLAP = "--no-overlap-p2p-communication"


@dataclass(frozen=True, kw_only=True)
class Request(JsonRecord):
    """What a run wants after the end of its processes.

    Raises:
        ValueError: a value of the wrong type or out of bounds, naming the field.
    """

    launch: str
    """Name of the launch that asks; `control.LAUNCH_VARIABLE`."""
    kind: Kind
    """`done`: nothing follows. `relayout`: start again under `layout`. `requeue`: start again in
    another allocation. `abort`: to start again would not help."""
    iteration: int
    consumed_samples: int
    """Samples done."""
    reason: str
    """One line for a person."""
    layout: Layout | None = None
    """To start under; needed by `relayout`."""
    micro_batch_size: int | None = None
    """To start with; None as the user's flags say."""
    global_batch_size: int | None = None
    """To start with; None as the user's flags say."""
    checkpoint: str | None = None
    """The folder of `--save`, as the user gave it, whose latest checkpoint to start from; needed by
    `relayout` after the first step."""

    def __post_init__(self) -> None:
        if not (isinstance(self.launch, str) and LAUNCH_NAME.fullmatch(self.launch)):
            raise ValueError(f"launch {shown(self.launch)} is not a name of a launch")
        if not (isinstance(self.kind, str) and self.kind in get_args(Kind)):
            raise ValueError(f"kind {shown(self.kind)} must be one of {', '.join(get_args(Kind))}")
        check_number("iteration", self.iteration, 0, MAX_NUMBER)
        check_number("consumed_samples", self.consumed_samples, 0, MAX_NUMBER)
        for name in _OPEN_NUMBERS:
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 1, _MAX_SIZE)
        check_text("reason", self.reason, _MAX_TEXT)
        if self.checkpoint is not None:
            check_text("checkpoint", self.checkpoint, _MAX_TEXT)
            folder = self.checkpoint
            if not folder or folder.startswith("-") or not folder.isprintable():
                raise ValueError(f"checkpoint {shown(folder)} cannot be the folder of a flag")
        if self.layout is not None and not isinstance(self.layout, Layout):
            raise ValueError(f"layout {shown(self.layout)} must be a layout")
        if self.layout is not None and self.layout.world_size > _MAX_SIZE:
            raise ValueError(f"layout {self.layout} is for more than {_MAX_SIZE} ranks")
        if self.kind == "relayout" and self.layout is None:
            raise ValueError("relayout needs a layout")
        if self.kind == "relayout" and self.checkpoint is None and self.iteration > 0:
            raise ValueError(f"relayout after {self.iteration} steps needs a checkpoint")

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "layout": self.layout and self.layout.to_json()}

    @classmethod
    def from_json(cls, data: Any) -> Request:
        """Reads what `to_json` wrote; see `JsonRecord.from_json`."""
        layout = data.get("layout") if isinstance(data, dict) else None
        if layout is not None:
            if not isinstance(layout, dict):
                raise ValueError(f"layout {shown(layout)} is not valid JSON object")
            if missing := sorted({"tp", "pp", "vpp", "dp"} - set(layout)):
                raise ValueError(f"{missing[0]} of the layout is missing")
            data = {**data, "layout": Layout.from_json(layout)}
        return super().from_json(data)

    @property
    def line(self) -> str:
        """The reason, fit to be printed: one line without control characters."""
        return one_line(self.reason) or "no reason given"


def is_supervised(env: Mapping[str, str] | None = None) -> bool:
    """Whether a supervisor reads requests and starts the run again."""
    return supervised_launch(os.environ if env is None else env) is not None


def blocked_layouts(env: Mapping[str, str] | None = None) -> list[Layout]:
    """Layouts in which the supervisor has seen the run crash. Skips what is not a layout."""
    words = (os.environ if env is None else env).get(BLOCKED_VARIABLE, "").split(",")
    found = []
    for word in words:
        with contextlib.suppress(ValueError):
            found.append(Layout.from_text(word))
    return found


def report_exit(outcome: RunOutcome) -> None:
    """Writes the request of a run that ends. On rank 0, under a supervisor; other ranks and other
    runs write nothing. Nothing is written either where the controller has already asked, or where
    the run should just be started again."""
    kind = kind_of(outcome)
    if kind is None or not is_supervised() or int(os.environ.get("RANK", "0")) != 0:
        return
    reason, text = outcome.reason, outcome.line
    if reason is not None and reason.is_urgent and outcome.save is None:
        text += "; nothing of it is kept without --save"
    request = Request(
        launch=os.environ[LAUNCH_VARIABLE],
        kind=kind,
        iteration=outcome.state.iteration,
        consumed_samples=outcome.state.consumed_samples,
        reason=text[:_MAX_REASON],
        layout=outcome.layout,
        checkpoint=outcome.save,
    )
    try:
        write_request(outcome.run_dir, request)
    except OSError as error:
        # Without it the supervisor goes by the exit code.
        logger.error(
            "the request to the supervisor (%s) cannot be written: %s", request.line, error
        )


def kind_of(outcome: RunOutcome) -> Kind | None:
    """What a run that ends asks for; None if it asks for nothing, or the controller has asked."""
    failure, reason = outcome.failure, outcome.reason
    if failure is not None:
        return None if failure.restart_helps else "abort"
    if reason is not None and reason.kind == "relayout":
        return None
    if reason is None or not reason.is_urgent or outcome.save is None:
        return "done"
    return "requeue"


def exit_code(outcome: RunOutcome) -> int:
    """The exit code of every rank after a run that did not fail."""
    asks = kind_of(outcome) == "requeue" and is_supervised()
    return Relaunch.exit_code if asks else 0


def write_request(run_dir: Path, request: Request) -> None:
    """Writes a request for the supervisor. On rank 0, after the checkpoint is committed.

    Raises:
        OSError: it cannot be written.
    """
    path = run_dir / REQUEST_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(request.to_json(), allow_nan=False, indent=1) + "\n")


def read_request(run_dir: Path, *, launch: str) -> Request | None:
    """The request of a launch, or None if it left none.

    Raises:
        ValueError: one line naming the file, if that holds no request.
    """

    def parse(data: Any) -> Request | None:
        other = data.get("launch") if isinstance(data, dict) else None
        if isinstance(other, str) and other != launch:
            return None
        return Request.from_json(data)

    return read_value(run_dir / REQUEST_FILE, parse)


StoredFlags = Mapping[str, Any]
"""The flags of a checkpoint to go on from and what followed from them; empty if unknown."""
_UNKNOWN: StoredFlags = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """What becomes of flags that give a run several layouts where it starts again."""

    others: Sequence[str]
    """All flags but those of the schedule."""
    own: Sequence[str] = ()
    """Those of the schedule as they are to be."""
    has_layout: bool = False
    """Whether they name the layout to start under, so that the flags of the first one stay."""
    lost: str = ""
    """What they no longer say, on one line; empty if nothing."""


class RelaunchSchedule(Protocol):
    """How an extra that gives a run several layouts starts it again. No torch."""

    def layout(self, stored: StoredFlags) -> Layout | None:
        """The layout that a run takes just where a checkpoint stands, which was saved under the one
        before; None where it takes no other."""
        ...

    def follow(
        self,
        argv: Sequence[str],
        request: Request,
        stored: StoredFlags,
        blocked: Collection[Layout],
    ) -> ScheduleFlags:
        """The user's flags for a request.

        Args:
            argv: without flags of another start; those of the first layout are there.
            request: of kind `relayout`.
            blocked: layouts that must not be taken later.
        """
        ...


def _followed(
    argv: Sequence[str], request: Request, stored: StoredFlags, blocked: Collection[Layout]
) -> ScheduleFlags:
    """The flags after the schedules of all extras."""
    found = ScheduleFlags(others=argv)
    for _, schedule in extras_with("relaunch"):
        more = schedule().follow(found.others, request, stored, blocked)
        found = ScheduleFlags(
            others=more.others,
            own=[*found.own, *more.own],
            has_layout=found.has_layout or more.has_layout,
            lost="; ".join(line for line in (found.lost, more.lost) if line),
        )
    return found


def merged(
    argv: Sequence[str],
    request: Request,
    *,
    stored: StoredFlags = _UNKNOWN,
    blocked: Collection[Layout] = (),
) -> list[str]:
    """The user's flags, changed to start as a `relayout` asks with `request.layout.world_size`
    ranks.

    Flags of another layout, another start or another batch are removed; the rest stays in order.
    Sequence parallelism follows the user's flags, as in `relayout.with_layout`: it is on wherever
    it can be if they name neither it nor a tensor size.

    Args:
        argv: the flags of the first launch, so that nothing piles up over many changes.
        request: of kind `relayout`.
        blocked: layouts that the run must not take later either.

    Raises:
        ValueError: one line, if it names another checkpoint folder than the flags.
    """
    layout = request.layout
    assert layout is not None, f"a request of kind {request.kind} starts nothing"
    values, switches = _of_another_start(argv, request)
    follows = _followed(argv, request, stored, blocked)
    own: list[str] = []
    if not follows.has_layout:
        others, more = _of_another_layout(argv, layout)
        values, switches, own = values | others, switches | more, _layout_flags(argv, layout)
    flags = [*without_flags(follows.others, values, switches), *own]
    if request.micro_batch_size is not None:
        flags += [_MICRO, str(request.micro_batch_size)]
    if request.global_batch_size is not None:
        flags += [_GLOBAL, str(request.global_batch_size)]
    if request.checkpoint is not None:
        flags += [_LOAD, request.checkpoint]
    return [*flags, *follows.own]


def scheduled_layout(stored: StoredFlags) -> Layout | None:
    """The layout that a schedule gives a run just where a checkpoint stands; None for none."""
    found = (schedule().layout(stored) for _, schedule in extras_with("relaunch"))
    return next((layout for layout in found if layout is not None), None)


def lost_flags(
    argv: Sequence[str],
    request: Request,
    *,
    stored: StoredFlags = _UNKNOWN,
    blocked: Collection[Layout] = (),
) -> str:
    """What the flags of `merged` no longer say of later layouts, on one line; empty if nothing."""
    return _followed(argv, request, stored, blocked).lost


def _of_another_start(argv: Sequence[str], request: Request) -> tuple[set[str], set[str]]:
    """Flags with values, and switches, of another batch or start.

    Raises:
        ValueError: the request names another checkpoint folder than the flags.
    """
    values, switches = set[str](), set[str]()
    if request.checkpoint is not None:
        save = value_of(argv, _SAVE)
        if save is None or Path(save).resolve() != Path(request.checkpoint).resolve():
            raise ValueError(
                f"the run asks to go on from {shown(request.checkpoint)}, and saves in {save}"
            )
        values |= {_LOAD, _STEP}
        switches |= set(_ANOTHER_START)
    if request.micro_batch_size is not None:
        values.add(_MICRO)
    if request.global_batch_size is not None:
        values.add(_GLOBAL)
    return values, switches


def _of_another_layout(argv: Sequence[str], layout: Layout) -> tuple[set[str], set[str]]:
    """Flags with values, and switches, that do not go with a layout."""
    values = {_TENSOR, _CONTEXT, _PIPELINE, _EXPERT, _EXPERT_TENSOR, _LAYERS_OF_CHUNK, _CHUNKS}
    values |= set(_CUT_FLAGS)
    switches: set[str] = set(_COUNTED_IN_CUT)
    if layout.vpp > 1 and layout.pp == 2:
        switches.add(_NO_OVERLAP)  # refused there, and only a matter of speed
    if number_of(argv, _GROUP) < layout.pp:
        values.add(_GROUP)  # likewise
    levels = _values_of(argv, _LEVELS)
    if levels and _product(levels) != layout.cp:
        # Likewise. Without them an exchange on two levels is refused, and p2p is the default.
        values.add(_LEVELS)
        values |= {_EXCHANGE} if value_of(argv, _EXCHANGE) == "a2a+p2p" else set()
    return values, switches


def _layout_flags(argv: Sequence[str], layout: Layout) -> list[str]:
    """Flags of a layout, with sequence parallelism as the user's flags want it."""
    names_tensor, length = value_of(argv, _TENSOR) is not None, number_of(argv, "--seq-length")
    follows = _SEQUENCE not in argv and not names_tensor
    fits = layout.tp > 1 and length > 0 and length % (layout.tp * layout.cp) == 0
    flags = [_SEQUENCE] if follows and fits else []
    if layout.tp > 1 or names_tensor:
        # Else the layouts of later phases still choose sequence parallelism by themselves.
        flags += [_TENSOR, str(layout.tp)]
    flags += [_CONTEXT, str(layout.cp)] if layout.cp > 1 else []
    flags += [_PIPELINE, str(layout.pp)]
    flags += [_EXPERT, str(layout.ep)] if layout.ep > 1 else []
    flags += [_EXPERT_TENSOR, str(layout.etp)] if layout.etp else []
    if layout.layer_partition:
        # Its text says how many chunks a stage has.
        mtp_num_layers = number_of(argv, "--mtp-num-layers")
        text = layer_partition.text_of_partition(layout.layer_partition, mtp_num_layers)
        flags += [layer_partition.FLAG, text]
    elif layout.vpp > 1:
        flags += [_CHUNKS, str(layout.vpp)]
    return flags


def resumed(argv: Sequence[str]) -> list[str]:
    """The user's flags, changed to load the latest checkpoint in `--save`. Unchanged if there is
    none."""
    save = value_of(argv, _SAVE)
    if save is None or not (Path(save) / TRACKER).exists():
        return list(argv)
    return [*without_flags(argv, {_LOAD, _STEP}, _ANOTHER_START), _LOAD, save]


def without_start(argv: Sequence[str]) -> list[str]:
    """The user's flags without those that begin another run from a checkpoint; for one that goes
    on."""
    return without_flags(argv, {_STEP}, _ANOTHER_START)


def number_of(argv: Sequence[str], flag: str) -> int:
    """The value of a flag; 0 where it is absent or no number."""
    value = value_of(argv, flag) or ""
    return int(value) if value.isdecimal() else 0


def _product(words: Sequence[str]) -> int:
    """Of whole numbers; 0 where one is none."""
    return math.prod(int(word) if word.isdecimal() else 0 for word in words)


def _values_of(argv: Sequence[str], flag: str) -> list[str]:
    """The values of a flag that takes several, as the parser reads them."""
    found: list[str] = []
    for i, word in enumerate(argv):
        if word == flag:
            found = _words_after(argv, i)
        elif word.startswith(flag + "="):
            found = [word[len(flag) + 1 :]]
    return found


def _words_after(argv: Sequence[str], i: int) -> list[str]:
    """The words between a flag and the next one."""
    return list(itertools.takewhile(lambda word: not word.startswith("--"), argv[i + 1 :]))


def value_of(argv: Sequence[str], flag: str) -> str | None:
    """The value of a flag as the parser reads it: the last one counts."""
    found = None
    for i, word in enumerate(argv):
        if word == flag and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith(flag + "="):
            found = word[len(flag) + 1 :]
    return found


def without_cut(argv: Sequence[str]) -> list[str]:
    """The flags without those of uneven stages."""
    return without_flags(argv, set(_CUT_FLAGS), set(_COUNTED_IN_CUT))


def without_flags(
    argv: Sequence[str], values: Collection[str], switches: Collection[str]
) -> list[str]:
    kept, skip = [], 0
    for i, word in enumerate(argv):
        if skip:
            skip -= 1
        elif word in (_LEVELS, _EXCHANGE) and word in values:
            skip = len(_words_after(argv, i))
        elif word in values:
            skip = 1
        elif word not in switches and word.partition("=")[0] not in values:
            # In the form --flag=value the value goes with it.
            kept.append(word)
    return kept
