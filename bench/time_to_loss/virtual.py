"""Who gets to a loss first on the paper's clusters, on a virtual clock?

    python -m bench.time_to_loss.virtual [--seeds N]

Every policy on every preset of tools/simulate.py; and some of them, with one seed, where something
is not as the controller believes: c, the truth about learning rates, the speeds, the cost of a
change, the course of the noise. Writes docs/results/time_to_loss_virtual.json and .svg. About 3
minutes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.support import RESULTS, arguments, figure, origin, write
from copus_ext.simulate.compare import compare
from copus_ext.simulate.contenders import contenders
from copus_ext.simulate.noise_trajectory import load
from copus_ext.simulate.scenario import preset, presets

FIRST_SEED = 100
"""Those below were looked at while the simulator was built."""
GOAL_SAVED, GOAL_SHARE = 0.10, 0.90
DEFAULT = "adaptive_goodput_forward"
BELIEVED = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""What some believe c to be; the others have their defaults."""
BELIEVERS = ("adaptive_copus_forward", "adaptive_goodput_forward")
STRONG = ("cbs_small", "cbs_large")
"""Baselines that also run with c = 8."""
JOURNAL = RESULTS / "act_run.journal.jsonl"
SHOWN = (
    DEFAULT,
    "adaptive_goodput_forward_c2",
    "adaptive_goodput_forward_c8",
    "adaptive_copus_forward",
    "adaptive_lr_model_forward",
    "adaptive_goodput_paper",
    "paper",
    "cbs_layouts",
)
RESTART_S = {"8xh100-3b": 235, "16xh100-13b": 404, "32xh100-32b": 809, "32xmi210-7b": 112}
"""Seconds of a change by checkpoint and restart in arXiv 2604.26687."""


def others(name: str) -> dict[str, Callable[[Any], Any]]:
    """What may be otherwise than the controller believes, by name."""

    def truth(objective: str) -> Callable[[Any], Any]:
        return lambda s: s.change(truth=dataclasses.replace(s.truth, objective=objective))

    return {
        "c is 1": lambda s: s.recalibrated(1.0),
        "c is 2": lambda s: s.recalibrated(2.0),
        "c is 4": lambda s: s.recalibrated(4.0),
        "c is 8": lambda s: s,
        "c is 16": lambda s: s.recalibrated(16.0),
        "c is 32": lambda s: s.recalibrated(32.0),
        "truth lr_model": truth("lr_model"),
        "truth copus": truth("copus"),
        "speeds known to 10 %": lambda s: s.change(speed_error=0.1, known_sd=0.1),
        "speeds taken as sure": lambda s: s.change(known_sd=0.0),
        "a change takes 5 s": lambda s: s.change(switch_cost_s=5.0),
        "a change takes a restart": lambda s: s.change(switch_cost_s=float(RESTART_S[name])),
        "noise of a measured run": lambda s: s.follow(load(JOURNAL, s.truth)),
    }


def run(
    scenario: Any, seeds: range, names: tuple[str, ...] | None, counted: list[float], what: str = ""
) -> Any:
    """A comparison; counts runs and seconds, and says what came of it."""
    everybody = contenders(scenario.batches)
    usual = {*everybody, *SHOWN}
    more = [(name, c) for name in BELIEVERS for c in BELIEVED]
    for name, c in [*more, *((name, 8.0) for name in STRONG)]:
        other = contenders(scenario.batches, noise_scale_multiplier=c)[name]
        everybody[f"{name}_c{c:g}"] = dataclasses.replace(other, name=f"{name}_c{c:g}")
    who = [c for n, c in everybody.items() if n in (usual if names is None else names)]
    baselines = [c for c in everybody.values() if c.is_baseline]
    began = time.perf_counter(), time.process_time()
    result = compare(scenario, who, seeds=seeds, baselines=baselines)
    counted[0] += sum(map(len, result.runs.values()))
    counted[1] += time.perf_counter() - began[0]
    counted[2] += time.process_time() - began[1]
    print(f"{scenario.name}, {what}: oracle saves {100 * result.oracle_saved(0):.1f} %")
    for name in SHOWN:
        score = result.score(name)
        saved = " ".join("-" if s is None else f"{100 * s:+.1f}" for s in score.saved)
        share = "-" if score.oracle_share is None else f"{100 * score.oracle_share:.0f} %"
        print(f"   {name:28s} saved % by seed: {saved}   of the oracle's: {share}", flush=True)
    return result


def shown(results: dict[str, Any]) -> list[str]:
    """Those that ran, without the baselines."""
    one = next(iter(results.values()))
    return [name for name in one.runs if name not in one.baselines]


def over(result: Any, name: str, others: list[str]) -> float | None:
    """Time that a policy saves over the fastest of others at each target, mean over those targets
    that both reach."""
    own = result.score(name).times_s
    found = []
    for target, seconds in own.items():
        times = [result.score(other).times_s[target] for other in others]
        best = min((t for t in times if t is not None), default=None)
        if best is not None and seconds is not None:
            found.append(1 - seconds / best)
    return statistics.fmean(found) if found else None


def judged(results: dict[str, Any], name: str) -> dict[str, Any]:
    """A policy against the goals, over some scenarios."""
    scores = {preset: result.score(name) for preset, result in results.items()}
    oracle = {
        preset: statistics.fmean(r.oracle_saved(i) for i in range(len(r.seeds)))
        for preset, r in results.items()
    }
    saved = [score.mean_saved for score in scores.values()]
    known = [s for s in saved if s is not None]
    statics = {p: [n for n in r.runs if n.startswith("static_")] for p, r in results.items()}
    mean = statistics.fmean(known) if len(known) == len(saved) else None
    whole = statistics.fmean(oracle.values())
    share = None if mean is None else mean / whole
    return {
        "mean_saved": mean,
        "oracle_saved": whole,
        "oracle_share": share,
        "by_preset": {preset: score.mean_saved for preset, score in scores.items()},
        "over_statics": {p: over(r, name, statics[p]) for p, r in results.items()},
        "over_same_start": {p: over(r, name, statics[p][:1]) for p, r in results.items()},
        "goal_saved_is_met": mean is not None and mean >= GOAL_SAVED,
        "goal_share_is_met": share is not None and share >= GOAL_SHARE,
    }


def draw(results: dict[str, Any], path: Path) -> None:
    """Time saved over the fastest baseline at each loss, a panel for each cluster."""
    with figure(path, 2, 2, figsize=(9, 7)) as axes:
        for axis, (preset, result) in zip(axes.flat, results.items()):
            targets = list(result.scenario.targets)
            base = [result.fastest(t, 0) for t in targets]
            best = [100 * (1 - result.best[0][t].seconds / b) for t, b in zip(targets, base)]
            axis.plot(targets, best, "k--", lw=1, label="oracle")
            for name in SHOWN:
                times = [result.score(name).times_s[t] for t in targets]
                saved = [
                    float("nan") if t is None else 100 * (1 - t / b) for t, b in zip(times, base)
                ]
                axis.plot(targets, saved, "o-", lw=1, ms=3, label=name)
            axis.axhline(0, color="grey", lw=0.8)
            axis.set(title=preset, xlabel="loss", ylabel="% saved", ylim=(-40, 20))
        axes[0, 0].legend(fontsize="x-small")


def main() -> None:
    """Runs, prints and writes."""
    parser = arguments(__doc__, "time_to_loss_virtual.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--presets", nargs="+", choices=presets(), default=presets())
    args = parser.parse_args()
    seeds, counted = range(FIRST_SEED, FIRST_SEED + args.seeds), [0.0, 0.0, 0.0]
    results = {name: run(preset(name), seeds, None, counted) for name in args.presets}
    papers = {name: results[name] for name in RESTART_S if name in results}
    varied: dict[str, dict[str, Any]] = {}
    for name in papers:
        for what, change in others(name).items():
            believers = tuple(f"{b}_c{c:g}" for b in BELIEVERS for c in BELIEVED)
            names = SHOWN + believers if what in ("c is 2", "c is 8", "c is 32") else SHOWN
            result = run(change(preset(name)), seeds[:1], names, counted, what)
            varied.setdefault(what, {})[name] = result
    about = {name: judged(papers, name) for name in SHOWN}
    record = {
        "what": "minutes to losses on a virtual clock; saved over the fastest baseline",
        "goals": {"saved": GOAL_SAVED, "oracle_share": GOAL_SHARE, "default": DEFAULT},
        "paper_clusters": about,
        "otherwise": {
            what: {name: judged(some, name) for name in shown(some)}
            for what, some in varied.items()
        },
        "runs": counted[0],
        "runs_per_minute": 60 * counted[0] / counted[1],
        "runs_per_minute_of_one_core": 60 * counted[0] / counted[2],
        **origin(),
        "presets": {name: result.to_json() for name, result in results.items()},
    }
    draw(papers, args.output.with_suffix(".svg"))
    write(args.output, record, hide=["presets", "otherwise"])


if __name__ == "__main__":
    main()
