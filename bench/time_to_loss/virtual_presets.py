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
from copus_ext.simulate.run import simulate
from copus_ext.simulate.scenario import BEYOND, preset
from copus_ext.simulate.speeds import planned
from copus_ext.simulate.training_dynamics import GroundTruth, TrainingDynamics

SHIPPED = ROOT / "copus_ext" / "simulate" / "data"
SEQ_LENGTH, FIRST, WARMUP_TOKENS = 2048, 16, 8e6
CALIBRATION = 8.0
"""c: that of `TRIED` which predicts the paper's adaptive runs best."""
TRIED = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
USUAL_EXPONENT, DOUBT = 1.0, 0.5
"""Of the noise scale over progress, and how far from it a fit may easily go."""
_BUDGET = 1.3
"""Samples of a run over those of the fastest static batch to the last loss."""
PAPER = ROOT / "bench" / "data" / "paper_times_to_loss.json"


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of the paper on its cluster."""

    name: str
    model: str
    cluster: dict[str, Any]
    links: str
    """What is taken to be between the GPUs."""
    largest: int
    """Batch."""
    pause_s: float
    """Seconds of a change of layout."""
    losses: list[float]
    minutes: dict[str, list[float | None]]
    """To each loss, by static batch."""
    adaptive: dict[str, list[float]]
    """To each loss, by policy."""
    switched: dict[str, Any] | None
    """The cluster with NVSwitch instead."""


def batches_of(paper: Model) -> list[int]:
    """The grid."""
    return [FIRST * 2**k for k in range(int(np.log2(paper.largest // FIRST)) + 1)]


def speeds_of(paper: Model) -> Any:
    """Throughputs on the paper's cluster."""
    limits = Limits(
        fixed={"vpp": 1, "cp": 1},
        recompute=("none",),
        use_distributed_optimizer=(False,),
        cross_node_tp=True,
    )
    model = PRESETS[paper.model].with_seq_length(SEQ_LENGTH)
    planner = Planner(model, ClusterSpec.from_json(paper.cluster), limits=limits)
    return planned(planner, batches_of(paper))


def minutes(paper: Model, speeds: Any, values: Any) -> tuple[dict[int, Any], Any, Any]:
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
        truth=GroundTruth(noise_scale_multiplier=1.0),
        end=BEYOND * end,
    )
    found = {}
    for batch in map(int, paper.minutes):
        speed = speeds.fastest(batch).samples_per_s
        found[batch] = [float(course.samples(batch, p)) / speed / 60 for p in progress]
    return found, course, progress


def fitted(paper: Model, speeds: Any) -> tuple[Any, float]:
    """The values of `minutes`, and the root mean square of the logarithms that are left."""
    falls = np.log(paper.losses)

    def residuals(values: Any) -> Any:
        found, _, progress = minutes(paper, speeds, values)
        left = [
            np.log(found[int(batch)][k] / seen)
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


def scenario(paper: Model, cluster: dict[str, Any], links: str, fit: dict[str, Any]) -> Any:
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
        "noise_scale_multiplier": CALIBRATION,
        "limits": {"fixed": {"vpp": 1}},
        "source": f"static batches of arXiv 2604.26687 fitted to {100 * fit['rms']:.1f} % (rms of "
        "the logarithm of the minutes); c is what predicts its adaptive runs best; pauses are "
        f"predicted from bytes and links, the paper's took {paper.pause_s:g} s (--switch-cost-s "
        f"{paper.pause_s:g})",
    }


def fit_of(paper: Model) -> dict[str, Any]:
    """The fit of one model, rounded as it ships."""
    speeds = speeds_of(paper)
    values, rms = fitted(paper, speeds)
    found, course, progress = minutes(paper, speeds, values)
    needed = {
        b: course.samples(b, progress[-1])
        for b in speeds.batches
        if b <= max(map(int, paper.minutes))
    }
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
        "layouts": {b: str(speeds.fastest(b).layout) for b in speeds.batches},
        "samples_per_s": {b: round(speeds.fastest(b).samples_per_s, 2) for b in speeds.batches},
    }


def predicted(paper: Model, calibration: float) -> dict[str, Any]:
    """The paper's adaptive runs, by the shipped decisions with c = 2 as it used, if the noise scale
    that is measured is Phi over `calibration`; samples without limit, and its own pauses."""
    scenario = preset(paper.name).recalibrated(calibration)
    scenario = scenario.change(total_samples=10**9, switch_cost_s=paper.pause_s)
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
    papers = [Model(**row) for row in json.loads(PAPER.read_text())["models"]]
    fits = {}
    for paper in papers:
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
            print(f"   static {batch}: {row}, paper {paper.minutes[str(batch)]}")
    held_out = {}
    for c in TRIED:
        one = held_out[c] = {paper.name: predicted(paper, c) for paper in papers}
        each = ", ".join(f"{name} {100 * found['rms']:.1f} %" for name, found in one.items())
        mean = float(np.sqrt(np.mean([found["rms"] ** 2 for found in one.values()])))
        print(f"adaptive runs with c = {c:g}: {100 * mean:.1f} % ({each})", flush=True)
    what = "minutes of static batches to losses: arXiv 2604.26687 and the course fitted to them"
    result = {"what": what, "fits": fits, "held_out": held_out, **origin()}
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
