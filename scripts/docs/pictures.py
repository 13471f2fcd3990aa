"""Draws the pictures of docs/concepts.md.

    python scripts/docs/pictures.py [--output docs/pictures]

From the journal of a run in docs/results, and the planner's predictions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
_TOP = 512
"""Upper end of the picture of the noise scale, samples."""
_DECISION = 15
"""The decision of that run whose speeds and critical batch size are shown."""
_TWO_RANKS = {
    "pp=2, four chunks": {"tp": 1, "pp": 2, "vpp": 4, "dp": 1},
    "dp=2": {"tp": 1, "pp": 1, "vpp": 1, "dp": 2},
    "tp=2": {"tp": 2, "pp": 1, "vpp": 1, "dp": 1},
}
_16_GPUS = {
    "tp=2, dp=8": {"tp": 2, "pp": 1, "dp": 8},
    "pp=2, dp=8": {"tp": 1, "pp": 2, "dp": 8},
    "pp=4, dp=4": {"tp": 1, "pp": 4, "dp": 4},
}
"""Layouts, by the name they are shown under."""


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the same data give the same file.
    matplotlib.rcParams |= {"svg.hashsalt": "copus", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    return pyplot


def _powers(axis: Any, values: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [str(value) for value in values])
    axis.minorticks_off()


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    # matplotlib ends some lines of an SVG file with a blank.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def draw_noise(decisions: list[dict[str, Any]], path: Path) -> None:
    """The noise scale with its interval, and the batch, over the samples of a run."""
    figure, axes = _pyplot().subplots(figsize=(6.5, 3), layout="constrained")
    x = [d["consumed_samples"] for d in decisions]
    noise = [d["situation"]["noise"] for d in decisions]
    low, middle = ([n[name] for n in noise] for name in ("low_samples", "phi_samples"))
    # An end that is not known lies above the picture.
    high = [n["high_samples"] or _TOP for n in noise]
    batch = [_now(d["situation"])["global_batch_size"] for d in decisions]
    axes.fill_between(x, low, high, color="C1", alpha=0.25, linewidth=0, label="95 % interval")
    axes.plot(x, middle, color="C1", label="noise scale phi")
    axes.step(x, batch, where="post", color="C0", label="global batch")
    axes.set_yscale("log", base=2)
    axes.set_ylim(1, _TOP)
    axes.set_yticks([4, 16, 64, 256], ["4", "16", "64", "256"])
    axes.set_ylabel("samples")
    axes.set_xlabel("samples trained")
    axes.legend(frameon=False)
    _save(figure, path)


def draw_goodput(decided: dict[str, Any], path: Path) -> None:
    """Throughput, efficiency and their product by batch and layout, at one decision."""
    situation, phi = decided["situation"], decided["decision"]["critical_batch_size"]
    sizes = sorted({row["global_batch_size"] for row in situation["rows"]})
    figure, panels = _pyplot().subplots(1, 3, figsize=(7.5, 2.8), layout="constrained")
    speed, sample, product = panels
    sample.plot(sizes, [1 / (1 + b / phi) for b in sizes], "o-", color="C7", markersize=3)
    for name, wanted in _TWO_RANKS.items():
        rows = [r for r in situation["rows"] if all(r[k] == v for k, v in wanted.items())]
        fastest = [
            max(r["samples_per_s"] for r in rows if r["global_batch_size"] == b) for b in sizes
        ]
        worth = [t / (1 + b / phi) for t, b in zip(fastest, sizes)]
        speed.plot(sizes, fastest, "o-", markersize=3, label=name)
        (line,) = product.plot(sizes, worth, "o-", markersize=3)
        best = worth.index(max(worth))
        product.plot(
            sizes[best], worth[best], "o", markersize=9, color=line.get_color(), mfc="none"
        )
    for axes, title in zip(panels, ("samples/s", "efficiency", "Goodput")):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("global batch")
        axes.set_ylim(bottom=0)
        _powers(axes, sizes)
    speed.legend(frameon=False, fontsize=7)
    _save(figure, path)


def _now(situation: dict[str, Any]) -> dict[str, Any]:
    return situation["rows"][situation["current"]]


def draw_layouts(path: Path) -> None:
    """Predicted throughput of three layouts by batch: which is fastest changes."""
    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.models import PRESETS
    from copus_ext.planner.search import Planner
    from copus_ext.planner.space import Limits

    sizes = [16, 32, 64, 128, 256, 512]
    whole = Limits(fixed={"cp": 1})
    planner = Planner(
        PRESETS["llama-2-13b"].with_seq_length(2048), preset("h100-80g:16"), limits=whole
    )
    plans = planner.rank(sizes, top=10_000)
    figure, axes = _pyplot().subplots(figsize=(6.5, 3), layout="constrained")
    for name, wanted in _16_GPUS.items():
        speeds = [
            max(
                plan.global_batch_size / answer.prediction.step_s
                for answer in plan.ranked
                if all(getattr(answer.configuration.layout, k) == v for k, v in wanted.items())
            )
            for plan in plans
        ]
        axes.plot(sizes, speeds, "o-", markersize=3, label=name)
    axes.set_ylabel("samples/s, predicted")
    axes.set_xlabel("global batch")
    _powers(axes, sizes)
    axes.legend(frameon=False)
    _save(figure, path)


def _decisions(name: str) -> list[dict[str, Any]]:
    from copus_ext.controller.decision_log import read_journal

    records = read_journal(RESULTS / f"{name}.journal.jsonl")
    return [record for record in records if record["kind"] == "decision"]


def main(argv: list[str] | None = None) -> int:
    """Draws all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures")
    args = parser.parse_args(argv)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    args.output.mkdir(parents=True, exist_ok=True)
    run = [d for d in _decisions("act_run") if d["situation"]["noise"]["phi_samples"]]
    draw_noise(run, args.output / "noise.svg")
    draw_goodput(next(d for d in run if d["number"] == _DECISION), args.output / "goodput.svg")
    draw_layouts(args.output / "layouts.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
