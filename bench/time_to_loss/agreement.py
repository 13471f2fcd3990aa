"""Does the simulator agree with the real clock? Runs of S4 under the controller, simulated again.

    python -m bench.time_to_loss.agreement            from the committed rows, half a minute
    python -m bench.time_to_loss.agreement --noise    first trains what measures the noise scale

Of each seed, losses of the static batches that had the reference's rate and warm-up are laid on one
curve over progress. A sample of a batch B makes w / (1 + B / (c phi)) progress: phi is the noise
scale that a run at the reference batch measured, and w a power of the scheduled learning rate. The
fit finds c and that power. The simulator gets curve, noise scale and the usual seconds of the steps
of every batch and micro-batch on the link. It runs the shipped controller from each first batch,
with the throughputs that a real run would know: predicted, and corrected by the steps that it has
timed. No run under the controller is in the fit, but their steps are in the usual seconds.
Simulated times to some losses stand beside the measured ones. Writes
docs/results/time_to_loss_agreement.json.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.support import RESULTS, ROOT, TRAINER, arguments, origin, read_run, torchrun
from bench.time_to_loss import real_clock, real_clock_figures
from bench.time_to_loss.real_clock import S4, Spec, best_static, flags_of
from bench.time_to_loss.real_clock_figures import Curve, Rows, Way, smooth, usual
from bench.time_to_loss.scenarios import DECIDING_S, MEASURING
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.link_timing import Link
from copus_ext.controller.throughput_table import ThroughputTable
from copus_ext.cost_model.cluster_spec import of_gpu
from copus_ext.cost_model.model_spec import PRESETS
from copus_ext.extras.simulate.contenders import Contender
from copus_ext.extras.simulate.noise_trajectory import NoiseTrajectory
from copus_ext.extras.simulate.run import Runner
from copus_ext.extras.simulate.scenario import Scenario
from copus_ext.extras.simulate.speeds import Key, Speeds
from copus_ext.extras.simulate.training_dynamics import GroundTruth, RateSchedule, TrainingDynamics
from copus_ext.goodput.inputs import ConfigThroughput
from copus_ext.goodput.state import ControllerState
from copus_ext.planner.configuration import Configuration
from megatron.trainer.config.arguments import parse_args, resolve
from megatron.trainer.config.layout import Layout

FILE = "time_to_loss_agreement.json"
MULTIPLIERS = np.geomspace(0.5, 64, 29).tolist()
"""c that are tried."""
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Powers of the scheduled learning rate that are tried."""
STEP_NOISE = 0.02
"""Scatter of the logarithm of a step's seconds on a quiet machine."""
_KNOTS, _DEGREE, _TARGETS = 12, 4, 5
_FIRST_TARGET = 0.4
"""Part of the samples at which a static run of the reference batch has the first target."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Noise scale that a static run of the reference batch measured."""

    samples: list[int]
    """Consumed."""
    phi: list[float]
    """Noise scale there, samples."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What lays static runs of a seed on one curve."""

    multiplier: float
    """c."""
    exponent: float
    """Power of the scheduled learning rate that a sample is worth."""
    rms: float
    """How far losses are off the curve, nats per token."""
    trajectory: NoiseTrajectory
    line: Any
    """Loss over ln(progress)."""

    def progress_at(self, loss: float) -> float:
        """Progress at which the curve first has a loss, samples.

        Raises:
            ValueError: it never has.
        """
        first, last = self.line.domain
        x = np.linspace(first, last, 4000)
        reached = np.flatnonzero(self.line(x) <= loss)
        if not len(reached):
            raise ValueError(f"the curve does not reach {loss:.3f}")
        return float(np.exp(x[reached[0]]))


def noise_of(seed: int, reference: Spec) -> Noise:
    """Trains the reference batch and measures the noise scale, on two ranks of this machine."""
    runner = real_clock.Runner(ROOT / "runs" / "time_to_loss_real_clock")
    at = ROOT / "runs" / f"time_to_loss_agreement_{seed}"
    shutil.rmtree(at, ignore_errors=True)
    command = torchrun(2, TRAINER, *flags_of(S4, reference), "--copus", "--copus-mode", "observe")
    command += ["--data-path", runner.data_path, "--run-dir", str(at)]
    with at.with_suffix(".txt").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, cwd=ROOT, timeout=3600)
    steps = read_run(at).steps
    name = "noise-scale/phi-samples"
    known = [(r["consumed_samples"], r["extra"][name]) for r in steps if r["extra"].get(name)]
    shutil.rmtree(at)
    return Noise(samples=[n for n, _ in known], phi=[round(phi, 4) for _, phi in known])


def trajectory_of(
    noise: Noise, batch: int, multiplier: float, schedule: RateSchedule
) -> NoiseTrajectory:
    """Noise scale over progress: medians of what the run measured, in parts of equal ratio."""
    samples, phi = np.array(noise.samples, dtype=float), np.array(noise.phi)
    parts = np.diff([0.0, *np.atleast_1d(schedule.worth(samples)).tolist()])
    progress = np.cumsum(parts / (1 + batch / (multiplier * phi)))
    x, y = np.log(progress), np.log(phi)
    edges = np.linspace(x[0], x[-1], _KNOTS + 1)
    points = []
    for low, high in itertools.pairwise(edges):
        inside = (x >= low) & (x <= high)
        if inside.any():
            points.append((float(np.exp(np.mean(x[inside]))), float(np.exp(np.median(y[inside])))))
    return NoiseTrajectory(progress=tuple(p for p, _ in points), phi=tuple(f for _, f in points))


def progress_of(
    batch: int, samples: Sequence[int], dynamics: TrainingDynamics, schedule: RateSchedule
) -> list[float]:
    """Progress of a static batch after so many samples."""
    done, before, found = 0.0, 0.0, []
    for worth in np.atleast_1d(schedule.worth(np.array(samples, dtype=float))).tolist():
        done = dynamics.advance(batch, done, worth - before)
        before = worth
        found.append(done)
    return found


def fit(statics: dict[int, Curve], noise: Noise, reference: int, warmup_samples: int) -> Fit:
    """Finds c and the power of the learning rate."""
    found = []
    for exponent, c in itertools.product(EXPONENTS, MULTIPLIERS):
        schedule = schedule_of(exponent, warmup_samples)
        trajectory = trajectory_of(noise, reference, c, schedule)
        truth = GroundTruth(noise_scale_multiplier=c, rate_exponent=exponent)
        dynamics = TrainingDynamics(phi_at=trajectory.phi_at, truth=truth, end=2.0 * S4.samples)
        points = []
        for batch, curve in statics.items():
            progress = progress_of(batch, curve.samples, dynamics, schedule)
            rows = zip(curve.samples, np.log(progress).tolist(), curve.losses)
            points += [(x, loss) for n, x, loss in rows if n >= warmup_samples]
        x, y = np.array(points).T
        line = np.polynomial.Polynomial.fit(x, y, _DEGREE)
        rms = float(np.sqrt(np.mean((line(x) - y) ** 2)))
        one = Fit(multiplier=c, exponent=exponent, rms=rms, trajectory=trajectory, line=line)
        found.append(one)
    return min(found, key=lambda one: one.rms)


def schedule_of(exponent: float, warmup_samples: int) -> RateSchedule:
    """The learning rate of the runs of S4."""
    return RateSchedule(
        warmup_samples=warmup_samples, total_samples=S4.samples, end_part=0.1, exponent=exponent
    )


def line_of(usual_s: dict[Way, float]) -> Callable[[Configuration], float]:
    """Seconds of a step of any micro-batch on data parallelism.

    A step takes a + M g(b), M micro-batches of b samples. What was timed counts as it was; another
    M of a timed b has the mean g of those; another b has g on a straight line.
    """
    known = {(b, batch): s for (_, b, batch), s in usual_s.items() if b * 2 <= batch}
    rows = [(1.0, batch / 2 / b, batch / 2) for b, batch in known]
    (start, each, slope), *_ = np.linalg.lstsq(np.array(rows), np.array([*known.values()]))
    of_micro: dict[int, list[float]] = {}
    for (b, batch), s in known.items():
        of_micro.setdefault(b, []).append((s - start) * 2 * b / batch)

    def seconds(c: Configuration) -> float:
        b, batch = c.micro_batch_size, c.global_batch_size
        if (b, batch) in known:
            return known[b, batch]
        one = statistics.fmean(of_micro[b]) if b in of_micro else each + slope * b
        return float(start + one * batch / 2 / b)

    return seconds


class LiveSpeeds(Speeds):
    """Speeds as a run on the real clock knows them, with all micro-batches."""

    def __init__(
        self,
        table: ThroughputTable,
        seconds: Callable[[Configuration], float],
        first: Configuration,
        batches: Sequence[int],
    ) -> None:
        row = ConfigThroughput(
            configuration=first, samples_per_s=1.0, relative_sd=0.0, source="predicted"
        )
        super().__init__([row])
        self.batches, self._live, self._seconds = list(batches), table, seconds
        self.state = ControllerState()
        """Of the run."""

    def true(self, row: ConfigThroughput) -> ConfigThroughput:
        c = row.configuration
        step_s = (1 + MEASURING) * self._seconds(c)
        return dataclasses.replace(row, samples_per_s=c.global_batch_size / step_s)

    def table(
        self, batches: Sequence[int], used: Any, layouts: Sequence, now: ConfigThroughput
    ) -> tuple[list[ConfigThroughput], dict[Key, int]]:
        rows, current = self._live.rows(
            batches,
            micro_batch_size=now.micro_batch_size,
            global_batch_size=now.global_batch_size,
            measured=self.state.measured_step_time,
        )
        return rows, {(now.layout, now.global_batch_size): current}


class LiveRunner(Runner):
    """A run that times its own steps."""

    def __init__(self, scenario: Scenario, contender: Contender, seed: int) -> None:
        super().__init__(scenario, contender, seed, None)
        assert isinstance(self.speeds, LiveSpeeds)
        self.speeds.state = self.state


def scenario_of(fit: Fit, speeds: LiveSpeeds, targets: list[float], warmup: int) -> Scenario:
    """What the simulator is told."""
    return Scenario(
        name="S4",
        model=next(iter(PRESETS)),  # Only asked where nothing is measured.
        seq_length=128,
        cluster=of_gpu("CPU-rank", nodes=1, gpus_per_node=2),
        batches=tuple(speeds.batches),
        total_samples=S4.samples,
        warmup_samples=warmup,
        targets={f"{loss:.4f}": fit.progress_at(loss) for loss in targets},
        trajectory=fit.trajectory,
        truth=GroundTruth(noise_scale_multiplier=fit.multiplier, rate_exponent=fit.exponent),
        measured=speeds,
        step_noise=STEP_NOISE,
        relayout_cost_s=0.0,
    )


def live_speeds(rows: Rows, own: dict[str, Any]) -> LiveSpeeds:
    """Speeds of a run under the controller."""
    spec = Spec(**own["spec"])
    link = Link(bytes_per_s=min(own["mbit_per_s"].values()) * 1e6 / 8)
    flags = [*flags_of(S4, dataclasses.replace(spec, kind="static")), "--data-path", "none"]
    table = ThroughputTable(
        resolve(parse_args(flags), 2), CopusConfig(copus=True), gpu=None, link=link
    )
    first = Configuration(
        layout=Layout(dp=2), micro_batch_size=spec.micro_batch, global_batch_size=spec.batch
    )
    doublings = [spec.batch * 2**k for k in range(-6, 7) if spec.batch * 2.0**k >= 2]
    return LiveSpeeds(table, line_of(usual(rows, spec.link)), first, doublings)


def of_seed(rows: Rows, seed: int, noise: Noise) -> dict[str, Any]:
    """Measured and simulated seconds of every run of a seed under the controller."""
    reference, link = best_static(S4, S4.reference_batch), S4.links[0]
    mine = [row for row in rows if row["spec"]["seed"] == seed]
    statics = {
        row["spec"]["batch"]: _curve(row)
        for row in mine
        if row["spec"]["kind"] == "static"
        and not real_clock_figures.other_length(row)
        and (row["spec"]["rate"], row["spec"]["warmup"]) == (reference.rate, reference.warmup)
    }
    warmup = int(reference.warmup * S4.samples)
    _, ours = real_clock_figures.curves_of(rows, link, seed)
    found = fit(statics, noise, S4.reference_batch, warmup)
    targets = targets_of(statics[S4.reference_batch], [*ours.values()])
    runs = {}
    for own in mine:
        if own["spec"]["kind"] != "copus":
            continue
        batch = own["spec"]["batch"]
        scenario = scenario_of(found, live_speeds(rows, own), targets, warmup)
        contender = Contender(name="copus", flags=CopusConfig(copus=True), first_batch=batch)
        run = LiveRunner(scenario, contender, seed).run()
        deciding = DECIDING_S * run.decisions / max(run.seconds, 1e-9)
        simulated = [t and (1 + deciding) * t for t in run.times_s.values()]
        measured = [ours[batch].time_to(loss) for loss in targets]
        off = [b / a - 1 for a, b in zip(measured, simulated) if a and b]
        runs[str(batch)] = {
            "measured_s": measured,
            "simulated_s": simulated,
            "off": off,
            "mean_off": statistics.fmean(map(abs, off)),
            "batches": [(c.consumed_samples, c.batch) for c in run.changes],
            "measured_batches": [(w["samples"], w["batch"]) for w in own["ways"]],
        }
    return {
        "seed": seed,
        "multiplier": found.multiplier,
        "exponent": found.exponent,
        "rms": found.rms,
        "static_batches": sorted(statics),
        "targets": targets,
        "from": runs,
    }


def _curve(row: dict[str, Any]) -> Curve:
    samples, seconds, losses = zip(*row["curve"])
    return Curve(samples=samples, seconds=seconds, losses=smooth(samples, losses))


def targets_of(reference: Curve, ours: Sequence[Curve]) -> list[float]:
    """Losses from one early in the run to the last that every run under the controller reaches."""
    first = next(
        loss
        for n, loss in zip(reference.samples, reference.losses)
        if n >= _FIRST_TARGET * S4.samples
    )
    last = max(min(curve.losses) for curve in ours)
    return np.linspace(first, last + 0.002, _TARGETS).round(4).tolist()


def main() -> None:
    parser = arguments(__doc__, FILE)
    parser.add_argument("--noise", action="store_true", help="train what measures the noise scale")
    args = parser.parse_args()
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # Each rank was on a node of its own.
    path: Path = args.output
    known = json.loads(path.read_text()) if path.exists() else {"noise": {}}
    rows = real_clock.rows_of(RESULTS / real_clock.FILE, [S4])
    seeds = []
    for seed in S4.seeds:
        if args.noise:
            spec = dataclasses.replace(best_static(S4, S4.reference_batch), seed=seed)
            known["noise"][str(seed)] = vars(noise_of(seed, spec))
        one = of_seed(rows, seed, Noise(**known["noise"][str(seed)]))
        seeds.append(one)
        print(
            f"seed {seed}: c {one['multiplier']:.2f}, power {one['exponent']} of the rate, losses "
            f"{one['rms']:.3f} off one curve of the static batches {one['static_batches']}"
        )
        for batch, run in one["from"].items():
            print(f"  from {batch}: off by", *(f"{100 * x:+.1f}" for x in run["off"]), "%")
    off = [run["mean_off"] for one in seeds for run in one["from"].values()]
    mean = statistics.fmean(off)
    print(f"mean {mean:.3f}, worst {max(off):.3f}")
    result = {
        "origin": origin(),
        "command": "python -m bench.time_to_loss.agreement",
        "mean_off": mean,
        "worst_off": max(off),
        "seeds": seeds,
        "noise": known["noise"],
    }
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
