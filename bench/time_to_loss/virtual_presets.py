"""The scenarios that ship with tools/simulate.py, from the paper's own baselines.

    python -m bench.time_to_loss.virtual_presets

Times to loss of the static batches in arXiv 2604.26687 (four clusters), with throughputs of the
planner, give for each model the noise scale as a power of the progress and the progress at which
each loss is reached: least squares of the logarithms. The paper's adaptive runs do not enter that
fit: they are predicted for some c, Phi over the noise scale that is measured, and the c that does
so best is that of the scenarios. Writes copus_ext/simulate/data/*.json and
docs/results/virtual_presets.json. Half a minute.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bench.support import ROOT, arguments, origin
from copus_ext.cost_model.cluster_spec import ClusterSpec
from copus_ext.cost_model.model_spec import PRESETS
from copus_ext.planner.search import Planner
from copus_ext.planner.space import Limits
from copus_ext.simulate.contenders import contenders
from copus_ext.simulate.course import GroundTruth, TrainingDynamics
from copus_ext.simulate.run import simulate
from copus_ext.simulate.scenario import BEYOND, preset
from copus_ext.simulate.speeds import planned

SHIPPED = ROOT / "copus_ext" / "simulate" / "data"
SEQ_LENGTH, FIRST, WARMUP_TOKENS = 2048, 16, 8e6
CALIBRATION = 8.0
"""c: that of `TRIED` which predicts the paper's adaptive runs best."""
TRIED = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
USUAL_EXPONENT, DOUBT = 1.0, 0.5
"""Of the noise scale over progress, and how far from it a fit may easily go."""
_BUDGET = 1.3
"""Samples of a run over those of the fastest static batch to the last loss."""
PAIRS = (
    "NVLink 4 joins two H100 (300 GB/s a direction, our reading), PCIe or the network the pairs; "
    "the planner knows two kinds of links: nodes of two, "
)
_H100 = {"gpu": "H100-80GB", "constants": "h100-80g"}


@dataclass(frozen=True, kw_only=True)
class Paper:
    """One model of the paper."""

    name: str
    model: str
    cluster: dict[str, Any]
    links: str
    largest: int
    pause_s: float
    losses: tuple[float, ...]
    minutes: dict[int, tuple[float | None, ...]]
    adaptive: dict[str, tuple[float, ...]]
    switched: dict[str, Any] | None = None


def pairs(gpus: int, nic: str) -> dict[str, Any]:
    """H100 of which two each share NVLink."""
    sizes = {"num_nodes": gpus // 2, "gpus_per_node": 2}
    return {**_H100, **sizes, "intra_bytes_per_s": "300GB/s", "nic_bytes_per_s": nic}


def switched(gpus: int) -> dict[str, Any]:
    """Nodes of eight H100 under one NVSwitch, a 400 Gb/s card each."""
    sizes = {"num_nodes": gpus // 8, "gpus_per_node": 8}
    return {**_H100, **sizes, "intra_bytes_per_s": "450GB/s", "nic_bytes_per_s": "400GB/s"}


HALVES = {
    "gpu": "MI210-64GB",
    "constants": "mi210-64g",
    "num_nodes": 8,
    "gpus_per_node": 4,
    "intra_bytes_per_s": "200GB/s",
    "nic_bytes_per_s": "25GB/s",
}
PAPERS = (
    Paper(
        name="8xh100-3b",
        model="llama-3.2-3b",
        cluster=pairs(8, "100GB/s"),
        links=PAIRS + "100 GB/s between them (PCIe 5, 50 GB/s a GPU)",
        switched=switched(8),
        largest=1024,
        pause_s=43.0,
        losses=(4.0, 3.5, 3.2, 3.0, 2.75),
        minutes={
            16: (12.4, 26.9, 46.2, 69.4, 102.7),
            32: (11.1, 20.8, 32.6, 47.0, 73.1),
            64: (13.1, 21.7, 33.3, 45.0, 67.3),
            128: (20.8, 30.7, 42.5, 55.7, None),
        },
        adaptive={
            "cbs_small": (11.5, 22.8, 37.9, 55.1, 83.7),
            "cbs_large": (13.6, 21.6, 31.4, 41.4, 59.0),
            "paper": (10.6, 18.7, 28.7, 37.5, 54.9),
        },
    ),
    Paper(
        name="16xh100-13b",
        model="llama-2-13b",
        cluster=pairs(16, "350Gb/s"),
        links=PAIRS + "350 Gb/s between them (one pair at a time at the border of a node)",
        switched=switched(16),
        largest=1024,
        pause_s=42.0,
        losses=(4.0, 3.5, 3.0, 2.75, 2.5),
        minutes={
            32: (11.7, 19.3, 38.3, 58.8, 91.0),
            64: (18.9, 26.6, 43.2, 60.5, 86.7),
            128: (32.2, 42.8, 61.9, 79.6, 105.2),
        },
        adaptive={
            "cbs_small": (10.7, 19.4, 39.5, 59.9, 88.9),
            "cbs_large": (14.2, 23.8, 43.5, 62.3, 89.0),
            "paper": (10.4, 18.4, 38.0, 55.8, 81.4),
        },
    ),
    Paper(
        name="32xh100-32b",
        model="qwen2.5-32b",
        cluster=pairs(32, "350Gb/s"),
        links=PAIRS + "350 Gb/s between them (one pair at a time at the border of a node)",
        switched=switched(32),
        largest=512,
        pause_s=52.0,
        losses=(4.5, 4.0, 3.8, 3.5, 3.2),
        minutes={64: (39.2, 51.5, 59.1, 74.2, None), 128: (61.2, None, None, None, None)},
        adaptive={
            "cbs_small": (21.3, 35.4, 43.5, 60.5, 85.7),
            "cbs_large": (24.8, 38.4, 46.8, 62.9, 87.4),
            "paper": (20.5, 33.0, 38.7, 55.8, 76.5),
        },
    ),
    Paper(
        name="32xmi210-7b",
        model="llama-2-7b",
        cluster=HALVES,
        links="200 GB/s within a NUMA half, 25 GB/s Ethernet between nodes of two halves; the "
        "planner knows two kinds of links: nodes are halves (64 GB/s between halves is left out)",
        largest=1024,
        pause_s=49.0,
        losses=(4.0, 3.5, 3.2, 3.0, 2.8),
        minutes={
            32: (13.8, 24.1, 36.7, 51.9, 77.2),
            64: (19.2, 30.1, 42.4, 57.9, None),
            128: (34.9, 65.6, None, None, None),
        },
        adaptive={
            "cbs_small": (11.1, 21.1, 32.5, 46.2, 71.6),
            "cbs_large": (17.6, 31.9, 44.9, 57.1, 80.8),
            "paper": (11.1, 20.7, 31.4, 42.1, 63.7),
        },
    ),
)


def batches_of(paper: Paper) -> list[int]:
    """The grid."""
    return [FIRST * 2**k for k in range(int(np.log2(paper.largest // FIRST)) + 1)]


def speeds_of(paper: Paper) -> Any:
    """Throughputs on the paper's cluster."""
    limits = Limits(
        fixed={"vpp": 1},
        recompute=("none",),
        use_distributed_optimizer=(False,),
        cross_node_tp=True,
    )
    model = PRESETS[paper.model].with_seq_length(SEQ_LENGTH)
    planner = Planner(model, ClusterSpec.from_json(paper.cluster), limits=limits)
    return planned(planner, batches_of(paper))


def minutes(paper: Paper, speeds: Any, values: Any) -> tuple[dict[int, Any], Any, Any]:
    """Minutes of every static batch to every loss; the course; and the progress at the losses.

    Args:
        paper: whose batches.
        speeds: of the configurations.
        values: ln(Phi at the end), exponent, ln(progress at the first loss), its increments.
    """
    progress = np.exp(values[2] + np.concatenate([[0.0], np.cumsum(np.exp(values[3:]))]))
    end, level, exponent = progress[-1], np.exp(values[0]), values[1]
    course = TrainingDynamics(
        phi_at=lambda x: level * (x / end) ** exponent,
        truth=GroundTruth(calibration=1.0),
        end=BEYOND * end,
    )
    found = {}
    for batch in paper.minutes:
        speed = speeds.fastest(batch).samples_per_s
        found[batch] = [float(course.samples(batch, p)) / speed / 60 for p in progress]
    return found, course, progress


def fitted(paper: Paper, speeds: Any) -> tuple[Any, float]:
    """The values of `minutes`, and the root mean square of the logarithms that are left."""
    falls = np.log(paper.losses)

    def residuals(values: Any) -> Any:
        found, _, progress = minutes(paper, speeds, values)
        left = [
            np.log(found[batch][k] / seen)
            for batch, row in paper.minutes.items()
            for k, seen in enumerate(row)
            if seen is not None
        ]
        # A loss that falls as a power of the progress, where nothing else is known.
        line = np.polyval(np.polyfit(falls, np.log(progress), 1), falls)
        usual = 0.05 * (values[1] - USUAL_EXPONENT) / DOUBT
        return np.array([*left, *(0.05 * (np.log(progress) - line)), usual])

    num = len(paper.losses)
    start = np.concatenate([[np.log(500.0), USUAL_EXPONENT, np.log(2e4)], np.full(num - 1, -0.7)])
    found = least_squares(residuals, start, max_nfev=400)
    seen = found.fun[: -1 - len(paper.losses)]
    return found.x, float(np.sqrt(np.mean(seen**2)))


def scenario(paper: Paper, cluster: dict[str, Any], links: str, fit: dict[str, Any]) -> Any:
    """What `tools/simulate.py` reads."""
    return {
        "model": paper.model,
        "seq_length": SEQ_LENGTH,
        "cluster": cluster,
        "links": links,
        "batches": batches_of(paper),
        "total_samples": fit["total_samples"],
        "warmup_samples": int(WARMUP_TOKENS / SEQ_LENGTH),
        "targets": fit["targets"],
        "noise": {"phi_end_samples": fit["phi_end_samples"], "exponent": fit["exponent"]},
        "calibration": CALIBRATION,
        "switch_cost_s": paper.pause_s,
        "limits": {"fixed": {"vpp": 1}},
        "source": f"static batches of arXiv 2604.26687 fitted to {100 * fit['rms']:.1f} % (rms of "
        "the logarithm of the minutes); c is what predicts its adaptive runs best",
    }


def fit_of(paper: Paper) -> dict[str, Any]:
    """The fit of one model, rounded as it ships."""
    speeds = speeds_of(paper)
    values, rms = fitted(paper, speeds)
    found, course, progress = minutes(paper, speeds, values)
    needed = {b: course.samples(b, progress[-1]) for b in speeds.batches if b <= max(paper.minutes)}
    fastest = min(needed, key=lambda b: needed[b] / speeds.fastest(b).samples_per_s)
    return {
        "targets": {str(loss): round(float(p), 1) for loss, p in zip(paper.losses, progress)},
        "phi_end_samples": round(float(np.exp(values[0])) / CALIBRATION, 1),
        "exponent": round(float(values[1]), 3),
        "total_samples": int(_BUDGET * needed[fastest] // 1000 * 1000),
        "rms": rms,
        "minutes": {b: [round(m, 1) for m in row] for b, row in found.items()},
        "paper_minutes": paper.minutes,
        "paper_adaptive_minutes": paper.adaptive,
        "layouts": {b: str(speeds.fastest(b).as_layout) for b in speeds.batches},
        "samples_per_s": {b: round(speeds.fastest(b).samples_per_s, 2) for b in speeds.batches},
    }


def predicted(paper: Paper, calibration: float) -> dict[str, Any]:
    """The paper's adaptive runs, by the shipped decisions with c = 2 as it used, if the noise scale
    that is measured is Phi over `calibration`; samples without limit."""
    scenario = preset(paper.name).recalibrated(calibration).change(total_samples=10**9)
    found, left = {}, []
    for name, seen in paper.adaptive.items():
        run = simulate(scenario, contenders(scenario.batches)[name], seed=0)
        own = [(run.times_s[str(loss)] or np.inf) / 60 for loss in paper.losses]
        found[name] = [round(m, 1) for m in own]
        left += np.log(np.array(own) / seen).tolist()
    return {"minutes": found, "rms": float(np.sqrt(np.mean(np.square(left))))}


def main() -> None:
    """Fits, prints and writes."""
    args = arguments(__doc__, "virtual_presets.json").parse_args()
    fits = {}
    for paper in PAPERS:
        fit = fits[paper.name] = fit_of(paper)
        kinds = {paper.name: (paper.cluster, paper.links)}
        if paper.switched is not None:
            about = "NVSwitch within nodes of eight, 400 GB/s between nodes"
            kinds[f"{paper.name}-nvswitch"] = paper.switched, about
        for name, (cluster, links) in kinds.items():
            data = scenario(paper, cluster, links, fit)
            (SHIPPED / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
        print(
            f"{paper.name}: Phi {CALIBRATION * fit['phi_end_samples']:.0f} at the last loss, as "
            f"progress^{fit['exponent']:.2f}, rms {100 * fit['rms']:.1f} %",
            flush=True,
        )
        for batch, row in fit["minutes"].items():
            print(f"   static {batch}: {row}, paper {list(paper.minutes[batch])}")
    held_out = {}
    for c in TRIED:
        one = held_out[c] = {paper.name: predicted(paper, c) for paper in PAPERS}
        each = ", ".join(f"{name} {100 * found['rms']:.1f} %" for name, found in one.items())
        mean = float(np.sqrt(np.mean([found["rms"] ** 2 for found in one.values()])))
        print(f"adaptive runs with c = {c:g}: {100 * mean:.1f} % ({each})", flush=True)
    what = "minutes of static batches to losses: arXiv 2604.26687 and the course fitted to them"
    result = {"what": what, "fits": fits, "held_out": held_out, **origin()}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
