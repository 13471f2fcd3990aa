"""Do messages of 8 bits between stages save what the planner says, and what do they cost in loss?

    sudo python -m bench.stage_messages

Network namespaces on this machine are the nodes, one stage on each, with links of 4, 1 and 0.2
Gbit/s and a quota of processor time (cgroup) for every rank.

First time: 2 and 4 stages, 4 and 16 micro-batches, each link. One run of each takes whole and short
messages in turn, step by step, so that both see the same machine. The planner predicts both from
the constants that ship and the rate of the link. Then loss: on two nodes with the slowest link,
three seeds train with whole messages and with short ones, and reach the held-out loss at which the
first end. Numbers are fp32 on CPU ranks, so that a short message has a quarter of the bytes; of
bf16 ones it has a half.

Writes docs/results/stage_messages.json. `--draw` prints its tables. It needs root, iproute2, two
cores and nothing else running, and takes about 20 minutes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bench import nodes
from bench.heterogeneity import QUOTA, quotas
from bench.nodes import Nodes
from bench.support import ROOT, TRAINER, RunRecord, arguments, make_dataset, origin, read_run, write
from copus_ext.commands.profile_layouts import model_of
from copus_ext.cost_model.cluster_spec import ClusterSpec, preset
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.step import step_time
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.space import points_of, to_rows
from megatron.training.config.layout import Layout
from tests.helpers.network_namespaces import DEVICE, address, star

MODEL = """--hidden-size 128 --ffn-hidden-size 512 --num-attention-heads 4
--seq-length 128 --max-position-embeddings 128 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer
--tokenizer-type ByteLevelTokenizer --split 95,4,1"""
RECIPE = """--lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05
--adam-beta2 0.95 --log-interval 100"""
SHORT = ["--pipeline-message-bits", "8"]
MICRO_BATCH, WARM_UP, STEPS = 4, 4, 48
RATES_MBIT, COUNTS, STAGES = (4000.0, 1000.0, 200.0), (4, 16), (2, 4)
"""The points: links, micro-batches of a step, stages."""
SEEDS, LOSS_STEPS, EVERY = (1, 2, 3), 300, 25
"""Of the runs for the loss."""
INTERVAL = 2.07
"""Standard errors of a 95 % interval, by Student's t for the pairs of steps of a point."""


def share_of(stages: int) -> float:
    """Processor time of a rank, in cores: two cores hold all of them, four with the usual quota."""
    return 4.0 * QUOTA / stages


def model_flags(stages: int) -> list[str]:
    """A layer on every stage. So little work stands for a faster processor."""
    return [*MODEL.split(), *RECIPE.split(), "--num-layers", str(stages)]


def cluster_of(stages: int, rate_mbit: float) -> tuple[ClusterSpec, Constants]:
    """Nodes of one rank each, with constants of CPU ranks. What a core computes to start something
    takes longer on a part of it."""
    share, spec = share_of(stages), preset("cpu:1")
    own = spec.load_constants()
    gpu = replace(
        spec.gpu,
        peak_flops=share * spec.gpu.peak_flops,
        fp32_peak_flops=share * spec.gpu.peak("fp32"),
        hbm_bytes_per_s=share * spec.gpu.hbm_bytes_per_s,
    )
    network = {"nic_bytes_per_s": rate_mbit * 1e6 / 8, "nic_is_measured": True}
    names = ("launch_s", "exchange_s", "step_s", "tp_latency_s")
    slower = replace(own, **{name: getattr(own, name) / share for name in names})
    return replace(spec, gpu=gpu, num_nodes=stages, gpus_per_node=1, **network), slower


@contextmanager
def site_of(stages: int, rate_mbit: float) -> Any:
    """So many nodes, any two with the same link."""
    with (
        quotas([share_of(stages)] * stages) as groups,
        star(stages, usual_mbit=rate_mbit) as names,
    ):
        addresses = [address(node) for node in range(stages)]
        yield Nodes(names=names, addresses=addresses, device=DEVICE, groups=groups)


def timed(site: Nodes, stages: int, count: int, data: list[str], work: Path) -> list[list[float]]:
    """Seconds of steps with whole messages, and with short ones."""
    folder = work / f"{stages}_{count}"
    program = str(ROOT / "bench" / "stage_messages_ranks.py")
    flags = [*model_flags(stages), *SHORT, *data, *_batch(count), "--eval-iters", "0"]
    flags += ["--pipeline-model-parallel-size", str(stages), "--run-dir", str(folder)]
    flags += ["--train-samples", str((WARM_UP + STEPS) * count * MICRO_BATCH)]
    site.run([program, str(stages), *flags], work / folder.name)
    seconds = [step["seconds"] for step in read_run(folder).steps[WARM_UP:]]
    return [seconds[0::2], seconds[1::2]]


def _batch(count: int) -> list[str]:
    sizes = {"--micro-batch-size": MICRO_BATCH, "--global-batch-size": count * MICRO_BATCH}
    return [word for flag, size in sizes.items() for word in (flag, str(size))]


def predicted(stages: int, count: int, rate_mbit: float) -> list[float]:
    """Seconds of a step with whole messages, and with short ones."""
    c = Configuration(
        layout=Layout(pp=stages),
        micro_batch_size=MICRO_BATCH,
        global_batch_size=count * MICRO_BATCH,
        overlap=False,
    )
    both = [c, replace(c, pipeline_message_bits=8)]
    model = model_of([*model_flags(stages), *_batch(count), "--train-iters", "1", "--mock-data"], 1)
    cluster, constants = cluster_of(stages, rate_mbit)
    rows = to_rows(model, cluster, points_of(both))
    return [float(seconds) for seconds in step_time(rows, constants).step_s]


def point(stages: int, count: int, rate_mbit: float, seconds: list[list[float]]) -> dict[str, Any]:
    """What was measured and what was predicted."""
    whole, short = map(statistics.median, seconds)
    pairs = np.log(np.array(seconds[1]) / np.array(seconds[0]))
    error = 1.25 * float(np.std(pairs, ddof=1)) / len(pairs) ** 0.5
    expected = predicted(stages, count, rate_mbit)
    return {
        "stages": stages,
        "num_microbatches": count,
        "rate_mbit": rate_mbit,
        "whole_s": whole,
        "short_s": short,
        "predicted_whole_s": expected[0],
        "predicted_short_s": expected[1],
        "saved": 1 - short / whole,
        "saved_error": error * short / whole,
        "predicted_saved": 1 - expected[1] / expected[0],
    }


def trained(site: Nodes, seed: int, bits: list[str], data: list[str], work: Path) -> RunRecord:
    """A run on two nodes."""
    folder = work / f"seed{seed}_{'short' if bits else 'whole'}"
    samples = LOSS_STEPS * COUNTS[0] * MICRO_BATCH
    flags = [*model_flags(2), *bits, *data, *_batch(COUNTS[0])]
    flags += ["--pipeline-model-parallel-size", "2", "--seed", str(seed), "--run-dir", str(folder)]
    flags += ["--train-samples", str(samples), "--eval-interval", str(EVERY), "--eval-iters", "8"]
    site.run([TRAINER, *flags], work / folder.name)
    return read_run(folder)


def curve_of(run: RunRecord) -> tuple[list[float], list[float]]:
    """Seconds of training until each evaluation, and its loss."""
    passed = dict(
        zip(
            (step["iteration"] for step in run.steps),
            np.cumsum([step["seconds"] for step in run.steps]),
        )
    )
    at = [e for e in run.evaluations if e["iteration"] in passed]
    seconds = [float(passed[e["iteration"]]) for e in at]
    return seconds, [e["losses"]["lm loss"] for e in at]


def compared(seed: int, whole: RunRecord, short: RunRecord) -> dict[str, Any]:
    """How much sooner short messages reach the loss at which whole ones end."""
    curves = [curve_of(run) for run in (whole, short)]
    target = curves[0][1][-1]
    reached = []
    for seconds, losses in curves:
        # A run that ends above the target is prolonged at its last slope.
        slope = (losses[-1] - losses[-2]) / (seconds[-1] - seconds[-2])
        under = next((i for i, loss in enumerate(losses) if loss <= target), None)
        if under is None:
            reached.append(seconds[-1] + (target - losses[-1]) / min(slope, -1e-9))
        else:
            ends = [(losses[i], seconds[i]) for i in (under, max(under - 1, 0))]
            below, above = zip(*ends)
            reached.append(float(np.interp(target, below, above)))
    return {
        "seed": seed,
        "target_loss": target,
        "last_losses": [losses[-1] for _, losses in curves],
        "seconds_to_target": reached,
        "times_faster": reached[0] / reached[1],
        "curves": [[seconds, losses] for seconds, losses in curves],
    }


def summary(points: list[dict[str, Any]], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that the goals name."""
    slow = [p for p in points if p["rate_mbit"] == 200 and p["stages"] == 2]
    apart = [r["last_losses"][1] - r["last_losses"][0] for r in runs]
    spread = [r["last_losses"][0] for r in runs]
    return {
        "points": len(points),
        "share_of_predicted_saving_200_mbit_pp2": [p["saved"] / p["predicted_saved"] for p in slow],
        "seconds_saved_over_predicted_200_mbit_pp2": [
            (p["whole_s"] - p["short_s"]) / (p["predicted_whole_s"] - p["predicted_short_s"])
            for p in slow
        ],
        "times_faster": [r["times_faster"] for r in runs],
        "last_loss_short_minus_whole": apart,
        "last_loss_sd_over_seeds": statistics.stdev(spread) if len(spread) > 1 else None,
    }


def table(result: dict[str, Any]) -> str:
    """Markdown. Measured, then predicted in parentheses; savings with their 95 % interval."""
    heads = "stages", "micro-batches", "link, Mbit/s", "whole, s", "8 bits, s", "saved, ms", "saved"
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for p in result["points"]:
        told, said = (
            [p[f"{of}{way}_s"] for way in ("whole", "short")] for of in ("", "predicted_")
        )
        cells = [str(p["stages"]), str(p["num_microbatches"]), f"{p['rate_mbit']:g}"]
        cells += [f"{x:.3f} ({y:.3f})" for x, y in zip(told, said)]
        cells.append(f"{1e3 * (told[0] - told[1]):.0f} ({1e3 * (said[0] - said[1]):.0f})")
        half = 100 * INTERVAL * p["saved_error"]
        cells.append(f"{100 * p['saved']:.1f} ± {half:.1f} % ({100 * p['predicted_saved']:.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| seed | last loss, whole | 8 bits | times faster |", "|---|---|---|---|"]
    for r in result["losses"]:
        both = " | ".join(f"{loss:.4f}" for loss in r["last_losses"])
        prolonged = " (prolonged)" if r["last_losses"][1] > r["target_loss"] else ""
        lines.append(f"| {r['seed']} | {both} | {r['times_faster']:.2f}{prolonged} |")
    return "\n".join(lines)


def main() -> None:
    """Measures, predicts, prints and writes."""
    parser = arguments(__doc__, "stage_messages.json")
    parser.add_argument("--draw", action="store_true", help="print the tables of --output, no more")
    parser.add_argument("--only", choices=("time", "loss"), help="keep the rest of --output")
    args = parser.parse_args()
    before = json.loads(args.output.read_text()) if args.output.exists() else {}
    if args.draw:
        print(table(before))
        return
    nodes.require()
    points, runs = before.get("points", []), before.get("losses", [])
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        data = ["--data-path", make_dataset(work / "stdlib"), "--data-cache-path", f"{work}/cache"]
        if args.only in (None, "time"):
            points = []
            for stages, rate in product(STAGES, RATES_MBIT):
                with site_of(stages, rate) as site:
                    (at := work / f"{rate:g}").mkdir(exist_ok=True)
                    for count in COUNTS:
                        seconds = timed(site, stages, count, data, at)
                        points.append(point(stages, count, rate, seconds))
                        print(points[-1], flush=True)
        if args.only in (None, "loss"):
            runs = []
            with site_of(2, RATES_MBIT[-1]) as site:
                for seed in SEEDS:
                    ways = [[], SHORT] if seed % 2 else [SHORT, []]
                    found = {bool(bits): trained(site, seed, bits, data, work) for bits in ways}
                    runs.append(compared(seed, found[False], found[True]))
                    print(runs[-1]["last_losses"], runs[-1]["times_faster"], flush=True)
    result = {
        **origin(),
        "command": "sudo python -m bench.stage_messages",
        "summary": summary(points, runs) if points and runs else None,
        "points": points,
        "losses": runs,
    }
    write(args.output, result)
    print(table(result))


if __name__ == "__main__":
    main()
