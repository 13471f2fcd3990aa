"""What does one run of three lengths save over one layout for all, and over jobs started by hand?

    python -m bench.phases      # about 6 minutes a round on two cores with nothing else running

First real: two CPU ranks train a small GPT on text with samples of 128, 512 and 2,048 tokens, in
one process with a layout for each length, in one process with each layout that can run all, and as
three jobs through checkpoints, each with the layout of its length. All read the same tokens. The
time between two jobs is what a restart costs: the end of one, the start of the other, reading the
checkpoint.

Then planned: two GPU clusters, a model each, 8k, 32k and 128k. The planner's best layout of each
phase with its moves, the best single layout, and the same layouts with the restart measured here in
place of a move. A restart of a large job takes longer than here; so the last line is a lower bound.

Writes docs/results/phases.json.
"""

from __future__ import annotations

import io
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from bench.support import TRAINER, arguments, launch, make_dataset, origin, read_run, write
from copus_ext.extras.phase_plan import command
from megatron.trainer.config.layout import LAYOUT_KEYS, Layout

MODEL = """--num-layers 4 --hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 8
--max-position-embeddings 2048 --swiglu --normalization RMSNorm --position-embedding-type rope
--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--use-distributed-optimizer --tokenizer-type ByteLevelTokenizer --eval-iters 0 --lr 1e-3
--min-lr 1e-4 --lr-decay-style cosine --log-interval 1000 --global-batch-size 16
--micro-batch-size 8 --pad-vocab-for-tensor-parallel-size 2"""
LENGTHS = "0:128 60%:512 80%:2048"
LAYOUTS = ("tp1.pp1.dp2", "tp1.pp1.dp2", "tp1.cp2.pp1.dp1")
"""Of the phases. A batch of the last one is one sample, which two replicas cannot share."""
SINGLE = ("tp1.cp2.pp1.dp1", "tp2.pp1.dp1", "tp1.pp2.dp1")
"""Those that can run all phases."""
RANKS, STEPS, ENDS = 2, 150, (90, 120, 150)
"""Steps of the run, and the last one of each phase."""

CLUSTERS = {
    "64 H100, 13B": ("llama-2-13b", "h100-80g:64", 1024, 2.6e11),
    "512 H100, 70B": ("llama-3-70b", "h100-80g:512", 2048, 1.4e12),
}
"""Name -> model, cluster, samples of 8k in a batch, tokens."""
PLANNED = "0:8192 90%:32768 97%:131072"


def measured(rounds: int) -> dict[str, Any]:
    """Seconds of the three ways on CPU ranks."""
    ways = {"one process": LAYOUTS, **{layout: (layout,) * 3 for layout in SINGLE}}
    found: dict[str, list[float]] = {way: [] for way in (*ways, "by hand")}
    restarts: list[float] = []
    losses: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="phases-") as name:
            folder = Path(name)
            data = ["--data-path", make_dataset(folder / "text"), "--split", "95,4,1"]
            both = [*MODEL.split(), *data, "--train-samples", str(16 * STEPS), "--copus"]
            both += [
                "--copus-mode",
                "observe",
                "--seq-length",
                "128",
                "--seq-length-schedule",
                LENGTHS,
            ]
            for way, layouts in ways.items():
                at, started = folder / way.replace(" ", "_"), time.monotonic()
                launch(RANKS, TRAINER, *both, *flags_of(layouts), "--run-dir", at)
                found[way].append(time.monotonic() - started)
                losses[way] = [step["losses"]["lm loss"] for step in read_run(at).steps]
            whole, between, own = by_hand(folder, both)
            found["by hand"].append(whole)
            restarts += between
            losses["by hand"] = own
    apart = max(abs(a / b - 1) for a, b in zip(losses["one process"], losses["by hand"]))
    if apart > 1e-5 or len(losses["one process"]) != len(losses["by hand"]):
        raise SystemExit(f"the losses of one process and of three jobs are {apart:.2g} apart")
    medians = {way: statistics.median(some) for way, some in found.items()}
    fastest = min(SINGLE, key=medians.__getitem__)
    return {
        "seconds": found,
        "best_single_layout": fastest,
        "one_layout_costs_more": medians[fastest] / medians["one process"] - 1,
        "by_hand_costs_more": medians["by hand"] / medians["one process"] - 1,
        "restart_s": statistics.median(restarts),
        "losses_apart": apart,
        "steps": len(losses["one process"]),
    }


def flags_of(layouts: Sequence[str], number: int = 0) -> list[str]:
    at = Layout.from_text(layouts[number])
    sizes = ["--tensor-model-parallel-size", str(at.tp), "--context-parallel-size", str(at.cp)]
    sizes += ["--pipeline-model-parallel-size", str(at.pp), *["--sequence-parallel"] * (at.tp > 1)]
    positions = [word.partition(":")[0] for word in LENGTHS.split()]
    later = " ".join(f"{p}:{layout}" for p, layout in zip(positions[1:], layouts[1:]))
    return [*sizes, "--layout-schedule", later]


def by_hand(folder: Path, both: list[str]) -> tuple[float, list[float], list[float]]:
    """Three jobs, each with the layout of its phase: seconds of all, seconds from the last step of
    one to the first of the next but for that step, and the losses."""
    saved, begun, losses = folder / "saved", time.monotonic(), []
    ends: list[float] = []
    starts: list[float] = []
    for number, end in enumerate(ENDS):
        # A job is not started whose later phases could not run, though another does them.
        flags = [*both, *flags_of(LAYOUTS, number), "--save", saved, "--exit-interval", end]
        flags += ["--load", saved] if number else []
        launch(RANKS, TRAINER, *map(str, flags), "--run-dir", run := folder / f"job{number}")
        steps = read_run(run).steps
        losses += [step["losses"]["lm loss"] for step in steps]
        starts.append(steps[0]["t"] - steps[0]["seconds"])
        ends.append(steps[-1]["t"])
    between = [start - end for end, start in zip(ends, starts[1:])]
    return time.monotonic() - begun, between, losses


def on_cluster(
    model: str, cluster: str, batch: int, tokens: float, restart_s: float
) -> dict[str, Any]:
    """Hours of the three ways as planned."""
    words = ["--model", model, "--cluster", cluster, "--global-batch-size", str(batch)]
    words += ["--seq-length-schedule", PLANNED, "--train-tokens", f"{tokens:g}", "--json"]
    with redirect_stdout(io.StringIO()) as out:
        command.main(words)
    answer = json.loads(out.getvalue())
    found, single = [stage["configuration"] for stage in answer["stages"]], answer["one_layout"]
    layouts = [
        str(Layout.from_json({n: c[n] for n in LAYOUT_KEYS if c.get(n) is not None})) for c in found
    ]
    restarts_s = restart_s * sum(a != b for a, b in itertools.pairwise(layouts))
    return {
        "layouts": layouts,
        "hours": answer["seconds"] / 3600,
        "moves_s": answer["pause_s"],
        "one_layout": single and {"layout": single["layout"], "hours": single["seconds"] / 3600},
        "one_layout_costs_more": single and single["costs_more"],
        "by_hand_hours_at_least": (answer["seconds"] - answer["pause_s"] + restarts_s) / 3600,
    }


def main() -> None:
    parser = arguments(__doc__, "phases.json")
    parser.add_argument("--rounds", type=int, default=3, help="of the real runs")
    args = parser.parse_args()
    machine, real = origin(), measured(args.rounds)
    planned = {name: on_cluster(*of, real["restart_s"]) for name, of in CLUSTERS.items()}
    write(args.output, {**machine, "real": real, "planned": planned})


if __name__ == "__main__":
    main()
