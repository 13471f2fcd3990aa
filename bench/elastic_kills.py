"""Does an elastic run survive the loss of ranks and nodes at any moment?

    python -m bench.elastic_kills --kills 100

Launches of four CPU ranks on one to four nodes (a node is a supervisor with its launcher and ranks)
train on the sources of Python's standard library. They lose ranks and whole nodes by SIGKILL, and
nodes that stop and go on later, at drawn moments: while ranks compute, in collectives, in the
optimizer, in saves, evaluations, copies, recoveries, and in moves to another layout, of which each
run makes one every 15 steps. The campaign goes on until enough of its kills have struck in moves,
saves and recoveries.

A rank that was killed is started again and joins. In runs of several nodes fewer ranks are asked
for at two drawn steps; a node that was let go is started again, and joins. Every run must end by
itself. Its record must hold every step once with the samples of an undisturbed run, and the losses
of that run. Then the same kills are timed with a relaunch in place of the recovery. Writes
docs/results/elastic_kills.json. It takes about a quarter of a minute for each kill; run nothing
else.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.support import ROOT, arguments, make_dataset, origin, write
from megatron.trainer.logging.metrics import read_metrics
from tests.extras.elastic.runs import COPY_INTERVAL, account, is_done, start, start_node, wait
from tests.helpers import processes

LAYOUTS = (
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 4",
    "",
)
NODES = ((4,), (2, 2), (2, 1, 1), (1, 1, 1, 1))
CHANGES = ("move", "save", "recovery")
MOMENTS = (
    *("compute", "optimizer", "after the optimizer", "any time", "copy", "evaluation"),
    *(2 * CHANGES),
)
_APART = 50
"""Steps between two kills. A rank that is to be killed and has not come back yet is killed then."""
_FIRST = 30
_HANG_S = 240.0
_MOVE_EVERY = 15
_TOLERANCE = 1e-6


def plan_of(seed: int, nodes: Sequence[int], kills: int) -> list[dict[str, Any]]:
    """The kills of one run, the last of which may take a node."""
    rng, found = random.Random(seed), []
    places = [[node, local] for node, ranks in enumerate(nodes) for local in range(ranks)]
    rng.shuffle(places)
    for i in range(kills):
        moment, number, victim = rng.choice(MOMENTS), 100 * seed + 10 * i, places[i % len(places)]
        kill = {"number": number, "victim": victim, "what": "rank", "seconds": 0.15}
        kill["step"] = _FIRST + _APART * i + rng.randrange(COPY_INTERVAL)
        kill["moment"] = "compute" if moment == "recovery" else moment
        if i == kills - 1 and len(nodes) > 1:
            kill["what"] = rng.choice(["node", "node", "frozen node"])
            kill["seconds"] = 8.0 if kill["what"] == "frozen node" else 0.15
        found.append(kill)
        if moment == "recovery":
            second = rng.choice([p for p in places if p[0] != victim[0] or kill["what"] == "rank"])
            if second != victim:
                again = {"number": number + 1, "step": 0, "moment": "recovery", "victim": second}
                found.append({**again, "what": "rank", "after": number})
    return found


def requests_of(seed: int, nodes: Sequence[int], kills: int) -> list[dict[str, int]]:
    """When a run asks for fewer ranks than it has."""
    rng = random.Random(1_000_003 * seed)
    return [
        {
            "number": i,
            "step": _FIRST + _APART * (kills * i // 2) + rng.randrange(_APART),
            "ranks": rng.randrange(sum(nodes) // 2, sum(nodes)),
        }
        for i in range(2 if len(nodes) > 1 and kills > 1 else 0)
    ]


def attend(
    children: list[subprocess.Popen[bytes]],
    again: Callable[[int], subprocess.Popen[bytes]],
    is_done: Callable[[], bool],
    timeout_s: float,
) -> list[int | None]:
    """Starts nodes again that were let go, until all have ended.

    Returns:
        Exit codes, None for one that hangs.
    """
    deadline_s = time.monotonic() + timeout_s
    ended: set[int] = set()
    while len(ended) < len(children) and time.monotonic() < deadline_s:
        time.sleep(0.5)
        for node, child in enumerate(children):
            if node in ended or child.poll() is None:
                continue
            if child.returncode == 0 and not is_done() and len(ended) + 1 < len(children):
                children[node] = again(node)
            else:
                ended.add(node)
    return wait(children, 0.1)


def rows_of(folder: Path, kills: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    records = read_metrics(folder / "run", superseded=True)
    starts = [r for r in records if r["kind"] == "run.start"]
    found = []
    for kill in kills:
        path = folder / f"kill-{kill['number']}"
        if not path.exists():
            continue
        happened = json.loads(path.read_text())
        begins = [s for s in starts if s["t"] > happened["t"]]
        steps = [r for r in records if r["kind"] == "step"]
        row = {k: kill[k] for k in ("number", "moment", "victim", "what")}
        row["iteration"] = happened["iteration"]
        if begins:
            first = begins[0]
            row["outcome"] = "live" if first.get("loaded") == _MEMORY else "checkpoint"
            row["ranks"] = len(first.get("members", ()))
            later = [s["t"] for s in steps if s["t"] > first["t"]]
            row["next_step_s"] = min(later, default=float("nan")) - happened["t"]
            before = [s["iteration"] for s in steps if s["t"] < first["t"]]
            row["repeated_steps"] = max(before, default=0) - first["iteration"]
        else:
            row["outcome"] = "no step followed"
        found.append(row)
    return found


_MEMORY = "memory of the ranks"


def trial(
    seed: int,
    reference: dict[int, float],
    *,
    kills: int,
    elastic: bool,
    data: str,
    flags: str = "",
) -> dict[str, Any]:
    """One run with its kills on a data set, with some more flags."""
    nodes = NODES[seed % len(NODES)]
    layout = f"{LAYOUTS[(seed // len(NODES)) % len(LAYOUTS)]} {flags}".strip()
    steps = _FIRST + _APART * kills + 20
    planned = plan_of(seed, nodes, kills)
    mark = f"elastic-{os.getpid()}-{seed}"
    with tempfile.TemporaryDirectory(prefix="elastic-") as scratch:
        folder = Path(scratch)
        plan = {"kills": planned, "move_every": _MOVE_EVERY}
        if elastic:
            plan["requests"] = requests_of(seed, nodes, kills)
        (folder / "plan.json").write_text(json.dumps(plan))
        how: dict[str, Any] = {"data": data, "mark": mark}
        children = start(folder, nodes, layout, steps, elastic=elastic, **how)

        def again(node: int) -> subprocess.Popen[bytes]:
            return start_node(folder, nodes, node, layout, steps, **how)

        done = functools.partial(is_done, folder, steps)
        codes = attend(children, again, done, _HANG_S + kills * 30.0)
        relaunches = 0
        took_leader = any(k["what"] == "node" and k["victim"][0] == 0 for k in planned)
        if None not in codes and not is_done(folder, steps) and took_leader:
            # As a batch script would: node 0, which decides on a relaunch, is gone.
            relaunches += 1
            (folder / "plan.json").write_text(json.dumps({"kills": []}))
            again_from = f"{layout} --load run"
            children = start(folder, nodes, again_from, steps, elastic=elastic, **how)
            codes = wait(children, _HANG_S)
        processes.end_marked(mark)
        log = "".join(path.read_text() for path in sorted(folder.glob("log*")))
        result = {
            "seed": seed,
            "nodes": list(nodes),
            "layout": layout or "data parallel",
            "command": _command_of(folder),
            "codes": codes,
            "hung": None in codes,
            "started_by_hand": relaunches,
            "nodes_let_go": log.count("let go is node"),
            "relaunches": log.count("start again under") + log.count("start again as at first"),
            **account(folder, steps, reference),
            "rows": rows_of(folder, planned),
        }
    result["done"] = result["last_step"] == steps
    return result


def _command_of(folder: Path) -> str | None:
    """What a rank that was killed ran, in the folder of its run; None where no kill struck."""
    kills = sorted(folder.glob("kill-*"))
    if not kills:
        return None
    program, *flags = json.loads(kills[0].read_text())["argv"]
    return shlex.join(["python", str(Path(program).relative_to(ROOT)), *flags])


def undisturbed(steps: int, data: str, flags: str = "") -> dict[int, float]:
    """Loss by iteration of the same samples without a kill, under one layout of two ranks."""
    with tempfile.TemporaryDirectory(prefix="elastic-") as scratch:
        folder = Path(scratch)
        (folder / "plan.json").write_text(json.dumps({"kills": []}))
        mark = f"elastic-{os.getpid()}-reference"
        children = start(folder, (2,), flags, steps, data=data, elastic=True, mark=mark)
        codes = wait(children, 900)
        assert codes == [0], (folder / "log0").read_text()[-3000:]
        rows = [r for r in read_metrics(folder / "run") if r["kind"] == "step"]
        return {r["iteration"]: r["losses"]["lm loss"] for r in rows}


def rounding(reference: dict[int, float], data: str, flags: str) -> float:
    """The largest difference of a loss between two layouts of two ranks, without a kill."""
    other = undisturbed(max(reference), data, f"{LAYOUTS[0]} {flags}".strip())
    return max(abs(other[i] / loss - 1) for i, loss in reference.items())


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Median, nine tenths, and the most."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        "median": statistics.median(ordered),
        "p90": ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)],
        "most": ordered[-1],
    }


def _num_in_changes(runs: Sequence[dict[str, Any]]) -> int:
    return sum(row["moment"] in CHANGES for run in runs for row in run["rows"])


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for run in runs for row in run["rows"]]
    live = [r for r in rows if r["outcome"] == "live"]
    deaths = [r for r in live if r["what"] != "frozen node"]
    return {
        "kills": len(rows),
        "kills_in_moves_saves_and_recoveries": _num_in_changes(runs),
        "recovered_live": len(live),
        "relaunched": sum(r["outcome"] == "checkpoint" for r in rows),
        "no_step_followed": sum(r["outcome"] == "no step followed" for r in rows),
        "hung": sum(run["hung"] for run in runs),
        "not_done": sum(not run["done"] for run in runs),
        "nodes_let_go": sum(run["nodes_let_go"] for run in runs),
        "samples_lost": sum(run["samples_lost"] for run in runs),
        "largest_loss_difference": max((r["largest_loss_difference"] for r in runs), default=0.0),
        "next_step_s": quantiles([r["next_step_s"] for r in deaths]),
        "next_step_after_silence_s": quantiles(
            [r["next_step_s"] for r in live if r["what"] == "frozen node"]
        ),
        "repeated_steps": quantiles([float(r["repeated_steps"]) for r in live]),
        "by_moment": dict(Counter(r["moment"] for r in rows)),
    }


def result_of(
    runs: Sequence[dict[str, Any]], relaunched: Sequence[dict[str, Any]], rounding: float
) -> dict[str, Any]:
    return {
        "what": "kills of ranks and nodes in elastic runs of four CPU ranks",
        "command": runs[0]["command"],
        "steps_between_copies": COPY_INTERVAL,
        "tolerance_of_losses": _TOLERANCE,
        "loss_difference_of_two_layouts_without_kills": rounding,
        **summary(runs),
        "relaunch_next_step_s": [
            row["next_step_s"] for run in relaunched for row in run["rows"] if "next_step_s" in row
        ],
        "runs": [{k: v for k, v in run.items() if k != "rows"} for run in runs],
        "rows": [{"seed": run["seed"], **row} for run in runs for row in run["rows"]],
        **origin(),
    }


def main() -> None:
    parser = arguments(__doc__, "elastic_kills.json")
    parser.add_argument("--kills", type=int, default=100)
    help_text = "at least so many of them in moves, saves and recoveries"
    parser.add_argument("--kills-in-changes", type=int, default=30, help=help_text)
    parser.add_argument("--kills-per-run", type=int, default=8)
    parser.add_argument("--relaunches", type=int, default=3, help="runs without --elastic")
    parser.add_argument("--flags", default="", help="more flags of every run, such as --bf16")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    per_run, runs = args.kills_per_run, []
    with tempfile.TemporaryDirectory(prefix="elastic-data-") as folder:
        how = {"data": make_dataset(Path(folder) / "stdlib"), "flags": args.flags}
        reference = undisturbed(_FIRST + _APART * per_run + 20, **how)
        rounded = rounding(reference, **how)
        while (
            sum(len(run["rows"]) for run in runs) < args.kills
            or _num_in_changes(runs) < args.kills_in_changes
        ):
            runs.append(trial(len(runs), reference, kills=per_run, elastic=True, **how))
            print(json.dumps({k: v for k, v in runs[-1].items() if k != "rows"}), flush=True)
            args.output.write_text(json.dumps(result_of(runs, [], rounded)) + "\n")
        relaunched = [
            trial(4 * i, reference, kills=1, elastic=False, **how) for i in range(args.relaunches)
        ]
    write(args.output, result_of(runs, relaunched, rounded), hide=("runs", "rows"))


if __name__ == "__main__":
    main()
