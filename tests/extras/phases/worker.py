"""Trains runs of three phases on four ranks, in one process and through checkpoints."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import torch.distributed as dist

from copus_ext.controller.decision_log import NAME, read_journal
from copus_ext.reshard.inprocess import InProcessResharder
from megatron.trainer.checkpoint.load import read_arguments
from megatron.trainer.common.collectives import broadcast_from_rank0
from megatron.trainer.common.step_settings import Request, StepSettings
from megatron.trainer.config.layout import Layout
from megatron.trainer.logging.metrics import read_metrics
from megatron.trainer.train.callbacks import Callback, CallbackContext
from tests.helpers.jobs import TINY, run
from tests.helpers.of_extras import of_extra
from tests.helpers.text import tokens

PHASE_PLAN = of_extra("copus_ext.extras.phase_plan.layouts")
SHARDED = "--use-distributed-optimizer"
BASE = (
    TINY.replace("--seq-length 32", "").replace("--max-position-embeddings 32", "")
    + f""" --max-position-embeddings 1024 --global-batch-size 64 --micro-batch-size 16
--train-iters 15 --clip-grad 0.5 --lr-decay-style cosine --lr-warmup-iters 2 --log-interval 1
{SHARDED}"""
)
LENGTHS = ["--seq-length", "64", "--seq-length-schedule", "0:64 40%:256 75%:1024"]
"""6, 6 and 3 steps."""
ROTARY = ["--rotary-base-schedule", "40%:40000 75%:160000"]
LAYOUTS = ["--layout-schedule", "40%:tp1.cp2.pp1.dp2 75%:tp2.cp2.pp1.dp1"]
MOVED_AT = 8
"""Step of the second phase after which a controller changes the layout."""
SAME = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
RESUMED = {
    "3 as tp2": (3, SAME[:2]),
    "9 as tp2.pp2": (9, SAME),
    "9 as dp4": (9, []),
    "12 as pp4": (12, ["--pipeline-model-parallel-size", "4"]),
}
"""Name -> checkpoint and layout of runs that go on inside a phase, without changes of layout."""


class Sizes(Callback):
    """Sets the batch of all steps, as a controller does."""

    keeps_settings = True

    def __init__(self, batch: int | None) -> None:
        self.batch = batch
        self.reads: list[tuple[int, int]] = []

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Notes what the step is to read."""
        self.reads.append((context.state.consumed_samples, context.global_batch_size or 0))

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        """Asks for the batch once."""
        if self.batch is None:
            return None
        settings, self.batch = StepSettings(global_batch_size=self.batch, micro_batch_size=2), None
        return Request(kind="change", reason="a test", settings=settings)


def break_on_rank_1(topic: str) -> None:
    """Breaks a change of layout after the old one has been taken down."""
    if topic == "copy" and dist.get_rank() == 1:
        raise MemoryError("a test")


def record(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is compared of steps."""
    names = ("consumed_samples", "seq_length", "global_batch_size", "learning_rate", "grad_norm")
    return [{**{n: s.get(n) for n in names}, "loss": s["losses"]["lm loss"]} for s in steps]


def main(output: Path) -> Any:
    from megatron.trainer.extras.phases import rotary

    results: dict[str, Any] = {}

    def go(name: str, flags: list[str], callbacks: Any = (), layouts: Any = None) -> None:
        folder, layouts = output / name.replace(" ", "_"), layouts or PHASE_PLAN.PhaseLayouts()
        steps = run([*LENGTHS, *flags], folder, [*callbacks, layouts], base=BASE)
        results[name] = record(steps)

    saved = ["--save", str(output / "saved"), "--save-interval", "3"]
    evaluated = ["--eval-iters", "1", "--eval-interval", "5"]
    go("live", [*ROTARY, *LAYOUTS, *saved, *evaluated])
    results["evaluations"] = [
        (r["iteration"], r["split"], r["seq_length"])
        for r in read_metrics(output / "live")
        if r["kind"] == "eval"
    ]
    # Started by hand three times, each in the layout of its phase.
    by_hand = ["--save", str(output / "hand"), "--load", str(output / "hand")]
    for number, end in enumerate(("6", "12", "15")):
        go(f"hand {number}", [*ROTARY, *LAYOUTS, *by_hand, "--exit-interval", end])
    # The same without any change of layout.
    go("same layout", [*ROTARY, *SAME])
    by_hand = [word.replace("/hand", "/hand-same") for word in by_hand]
    for number, end in enumerate(("6", "12", "15")):
        go(f"same by hand {number}", [*ROTARY, *SAME, *by_hand, "--exit-interval", end])
    for name, (iteration, layout) in RESUMED.items():
        load = ["--load", str(output / "saved"), "--ckpt-step", str(iteration)]
        go(name, [*ROTARY, *load, *layout])
    # Two phases of one length, so that a table of that length is there already. Such weights tell
    # positions apart from the first step on.
    one_length = [*SAME, *ROTARY, "--seq-length-schedule", "0:64 40%:64 75%:1024"]
    one_length += ["--init-method-std", "0.2"]
    go("one length", one_length)
    clear, rotary.clear_rotary_tables = rotary.clear_rotary_tables, lambda: None
    try:
        go("stale tables", one_length)
    finally:
        rotary.clear_rotary_tables = clear
    # One schedule of the learning rate in tokens, without phases.
    plain = [word for word in BASE.split() if word != SHARDED]
    steps = run(["--seq-length", "64"], output / "plain", base=" ".join(plain))
    results["plain"] = record(steps)
    results["stored bases"] = [
        read_arguments(output / "saved", step=step)["rotary_base"] for step in (3, 9, 15)
    ]
    # The last step of the first phase is left out.
    go("skipped", [*ROTARY, *LAYOUTS, "--iterations-to-skip", "6"])
    fail = PHASE_PLAN.PhaseLayouts()
    fail.own.fault = break_on_rank_1
    go("a change that fails", [*ROTARY, *LAYOUTS], layouts=fail)
    save_while_training(output, go, results)
    ramp(output, results)
    move_inside(output, go, results)
    fill_up(output, go, results)
    control(output, go, results)
    blend(output, results)
    return results


def save_while_training(output: Path, go: Any, results: dict[str, Any]) -> None:
    """Checkpoints that are written while training goes on, with a change of layout behind them."""
    predicted, move = [], InProcessResharder.move

    def noted(self: Any, *args: Any, predicted_s: float = 0.0) -> Any:
        predicted.append(predicted_s)
        return move(self, *args, predicted_s=predicted_s)

    save = ["--save", str(output / "async-saved"), "--async-save"]
    with mock.patch.object(InProcessResharder, "move", noted):
        go("async", [*ROTARY, *LAYOUTS, *save])
    results["predicted pauses"] = predicted
    results["order of async"] = events(output / "async", "checkpoint.commit", "relayout.begin")


def events(folder: Path, *kinds: str) -> list[tuple[str, int]]:
    """Kind and iteration of some events of a run, in the order in which they happened."""
    if dist.get_rank() != 0:
        return []
    return [(r["kind"], r["iteration"]) for r in read_metrics(folder) if r["kind"] in kinds]


def ramp(output: Path, results: dict[str, Any]) -> None:
    """The batch doubles, and the layout and the micro-batch change with it."""
    base = BASE.replace("--train-iters 15", "--train-samples 256 --seq-length 64")
    base = base.replace("--lr-warmup-iters", "--lr-warmup-samples")
    grows = ["--global-batch-size", "32", "--step-batch-size-schedule", "0:16 8192:32"]
    grows += ["--micro-batch-size", "4"]
    moves = ["--layout-schedule", "50%:tp2.pp1.dp2", "--micro-batch-size-schedule", "8192:2"]
    save = ["--save", str(output / "ramp-saved")]

    def go(name: str, flags: list[str]) -> None:
        folder = output / name.replace(" ", "_")
        results[name] = record(
            run([*grows, *flags], folder, [PHASE_PLAN.PhaseLayouts()], base=base)
        )

    go("ramp", [])
    go("ramp that moves", [*moves, *save])
    results["order of ramp"] = events(
        output / "ramp_that_moves", "checkpoint.commit", "phase", "relayout.begin", "layout"
    )
    go("ramp resumed", ["--load", save[1], "--ckpt-step", "8"])


class Watched(Callback):
    """Notes which steps must have their exact gradient, and whether the old model is still there
    when the new one is."""

    def __init__(self) -> None:
        self.exact: list[bool] = []
        self.old: list[Any] = []
        self.is_there: list[bool] = []

    def on_grads_ready(self, context: CallbackContext) -> None:
        """Notes it of the step."""
        self.exact.append(context.needs_exact_step)

    def on_relayout_start(self, context: CallbackContext) -> None:
        """Keeps only a weak reference."""
        self.old.append(weakref.ref(context.model[0]))

    def on_relayout_end(self, context: CallbackContext) -> None:
        """Notes it of the change."""
        self.is_there.append(self.old[-1]() is not None)


def move_inside(output: Path, go: Any, results: dict[str, Any]) -> None:
    """A controller changes the layout inside the second phase, and the third phase asks for
    another one."""
    from copus_ext.controller import callback
    from tests.distributed.worker_controller import controllers

    decide = callback.decide

    def once(inputs: Any) -> Any:
        decision = decide(inputs)
        if inputs.iteration != MOVED_AT:
            return replace(decision, kind="stay", to=inputs.now)
        row, layout = inputs.rows[inputs.current], Layout.from_text("tp2.pp1.dp2")
        to = replace(row, configuration=replace(row.configuration, layout=layout))
        return replace(decision, kind="relayout", to=to, reason="a test")

    flags = ["--lr-decay-style", "constant", "--lr-warmup-iters", "0", *ROTARY]
    more = ["--save", str(output / "inside-saved"), "--layout-schedule", LAYOUTS[1].split()[1]]
    acting = controllers()[0](
        copus_policy="static",
        copus_mode="act",
        copus_layouts="all",
        copus_interval=1.0,
        copus_gns_interval=1,
        copus_relayout_checkpoint_tokens=1.0,
    )
    watched = Watched()
    with mock.patch.object(callback, "decide", once):
        go("moved inside", [*flags, *more], [acting, watched], PHASE_PLAN.PhaseLayouts(acting))
    go("not moved", flags)
    results["exact steps"], results["old models"] = watched.exact, watched.is_there
    kinds = ("checkpoint.commit", "layout")
    results["order of moved inside"] = events(output / "moved_inside", *kinds)
    results["costs"] = [len(acting.state.layout_costs.pauses_s), acting.state.layout_costs.paused_s]
    if dist.get_rank() == 0:
        results["relayouts"] = [
            r
            for r in read_journal(output / "moved_inside" / NAME)
            if r["kind"].startswith("relayout")
        ]


def fill_up(output: Path, go: Any, results: dict[str, Any]) -> None:
    """Steps that stand two samples before a boundary, which four replicas cannot share."""
    odd = ["--save", str(output / "odd"), "--exit-interval", "2"]
    go("odd", [*odd, *SAME], [Sizes(318)])
    load = ["--load", str(output / "odd"), "--exit-interval", "4"]
    for name, layout in (("one replica", SAME), ("four replicas", [])):
        for way in ("", " per token"):
            more = ["--calculate-per-token-loss"] if way else []
            sizes = Sizes(None)
            go(f"{name}{way}", [*load, *layout, *more], [sizes])
            results[f"reads of {name}{way}"] = sizes.reads


def blend(output: Path, results: dict[str, Any]) -> None:
    """Another blend of texts from the second phase on; the second run finds the index files."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    names = [str(output / "data" / name) for name in "abc"]
    if dist.get_rank() == 0:
        (output / "data").mkdir()
        for name, part in zip(names, tokens().chunk(3), strict=True):
            builder = IndexedDatasetBuilder(f"{name}.bin", dtype=numpy.uint16)
            for document in part[: 400 * 270].split((20, 90, 100, 60) * 400):
                builder.add_document(document, [len(document)])
            builder.finalize(f"{name}.idx")
    dist.barrier()
    a, b, c = names
    data = ["--data-path", "0.7", a, "0.3", b, "--split", "8,1,1"]
    data += ["--phase-data-path", "1:", "0.5", b, "0.5", c, "2:", c]
    for name in ("blend", "blend again"):
        flags = [*LENGTHS, *data, *SAME]
        steps = run(flags, output / name.replace(" ", "_"), base=BASE)
        results[name] = record(steps)
    results["index files"] = len(list((output / "data").rglob("*-phase.npy")))


def control(output: Path, go: Any, results: dict[str, Any]) -> None:
    """A controller doubles the batch while phases follow one another."""
    from tests.distributed.worker_controller import controllers

    def acting() -> list[Any]:
        policy = {"copus_policy": "doubling", "copus_doubling_first_tokens": 128 * 64.0}
        return [controllers()[0](**policy, copus_mode="act", copus_gns_interval=1)]

    flags = ["--lr-decay-style", "constant", "--lr-warmup-iters", "0", "--micro-batch-size", "4"]
    saved = ["--save", str(output / "controlled-saved"), "--save-interval", "1"]
    go("controlled", [*flags, *saved], acting())
    inside = 0
    if dist.get_rank() == 0:
        metrics = read_metrics(output / "controlled")
        results["noise"] = [s["noise"] for s in metrics if s["kind"] == "step"]
        journal = (output / "controlled" / "journal.jsonl").read_text().splitlines()
        results["journal"] = [json.loads(line) for line in journal]
        lengths = [step["seq_length"] for step in results["controlled"]]
        inside = lengths.index(256) + 1
    inside = broadcast_from_rank0(inside)
    load = ["--load", str(output / "controlled-saved"), "--ckpt-step", str(inside)]
    go("controlled resumed", [*flags, *load], acting())
