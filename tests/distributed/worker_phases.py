"""Trains runs of three phases on four ranks, in one process and through checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from copus_ext.controller.phase_layouts import PhaseLayouts
from copus_ext.reshard.inprocess import InProcessResharder
from megatron.training.checkpoint.load import read_arguments
from megatron.training.common.collectives import broadcast_from_rank0
from megatron.training.common.step_settings import Request, StepSettings
from megatron.training.logging.metrics import read_metrics
from megatron.training.train.callbacks import Callback, CallbackContext
from tests.helpers.jobs import TINY, run

SHARDED = "--use-distributed-optimizer"
BASE = (
    TINY.replace("--seq-length 32", "").replace("--max-position-embeddings 32", "")
    + f""" --max-position-embeddings 1024 --global-batch-size 64 --train-iters 15 --clip-grad 0.5
--lr-decay-style cosine --lr-warmup-iters 2 --log-interval 1 {SHARDED}"""
)
LENGTHS = ["--seq-length-schedule", "0:64 40%:256 75%:1024"]
"""6, 6 and 3 steps."""
ROTARY = ["--rotary-base-schedule", "40%:40000 75%:160000"]
LAYOUTS = ["--layout-schedule", "40%:tp1.cp2.pp1.dp2 75%:tp2.cp2.pp1.dp1"]
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
        settings, self.batch = StepSettings(global_batch_size=self.batch, micro_batch_size=1), None
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
    """Returns the step records of every run."""
    from megatron.training.model import rotary

    results: dict[str, Any] = {}

    def go(name: str, flags: list[str], callbacks: Any = (), layouts: Any = None) -> None:
        folder, layouts = output / name.replace(" ", "_"), layouts or PhaseLayouts()
        steps = run([*LENGTHS, *flags], folder, [layouts, *callbacks], base=BASE)
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
    # Two phases of one length, so that a table of that length is there already.
    one_length = [*SAME, *ROTARY, "--seq-length-schedule", "0:64 40%:64 75%:1024"]
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
    fail = InProcessResharder(fault=break_on_rank_1)
    go("a change that fails", [*ROTARY, *LAYOUTS], layouts=PhaseLayouts(lambda: fail))
    fail.close()
    fill_up(output, go, results)
    control(output, go, results)
    blend(output, results)
    return results


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
    """Real data, another blend from the second phase on; the second run finds the index files."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    names = [str(output / "data" / name) for name in "abc"]
    if dist.get_rank() == 0:
        (output / "data").mkdir()
        for number, name in enumerate(names):
            builder = IndexedDatasetBuilder(f"{name}.bin", dtype=numpy.uint16)
            for i in range(1600):
                length = (20, 90, 100, 60)[i % 4]
                builder.add_document((torch.arange(length) * (number + 2) + i) % 100, [length])
            builder.finalize(f"{name}.idx")
    dist.barrier()
    a, b, c = names
    data = ["--data-path", "0.7", a, "0.3", b, "--split", "8,1,1"]
    data += ["--phase-data-path", "1:", "0.5", b, "0.5", c, "2:", c]
    base = BASE.replace("--mock-data", "")
    for name in ("blend", "blend again"):
        flags = [*LENGTHS, *data, *SAME]
        steps = run(flags, output / name.replace(" ", "_"), base=base)
        results[name] = record(steps)
    results["index files"] = len(list((output / "data").rglob("*-phase.npy")))


def control(output: Path, go: Any, results: dict[str, Any]) -> None:
    """A controller doubles the batch while phases follow one another."""
    from tests.distributed.worker_controller import controllers

    def acting() -> list[Any]:
        policy = {"copus_policy": "doubling", "copus_doubling_first_tokens": 128 * 64.0}
        return [controllers()[0](**policy, copus_mode="act", copus_gns_interval=1)]

    flags = ["--lr-decay-style", "constant", "--lr-warmup-iters", "0"]
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
