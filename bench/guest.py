"""What does the controller cost in Megatron-LM's own program, and what do its moves leave unequal?

    python -m bench.guest losses round_trips overhead restarts

It runs `megatron.training` of the newest megatron-core's wheel on CPU ranks, unmodified, with real
text; see `tests/guest`. Each section replaces its own part of docs/results/guest.json.

* losses: three moves and two changes of the batch, against the same batches on a layout that stays.
* round_trips: to seven layouts and back at step boundaries, against the plain run, bit by bit.
* overhead: steps under `--copus-mode observe` against steps of the same run without it.
* restarts: a move in the running job, and the same by save, exit, start and load, in turn.

The last two need a core per rank and nothing else running.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.support import ROOT, origin, ratio_summary
from copus_ext.gns.smoothing import LARGEST_INTERVAL
from megatron.trainer.common.core_version import since
from tests.guest.alternating import is_watched
from tests.guest.program import SPLIT, evaluations, steps, tensors, train
from tests.guest.test_moves import AWAY, HOME

RESULT = ROOT / "docs" / "results" / "guest.json"
WHAT = "the controller in Megatron-LM's own program; see bench/guest"
SEEDS = (1, 2, 3)
PAIRS = 7
TIMED_STEPS = 160
DENSE = "--tensor-model-parallel-size 2 --train-iters 24"
WALK = {3: ("tp1.pp2.dp2", 16), 6: ("tp1.pp1.dp4", 16), 9: (HOME, 8)}
LARGER = """--hidden-size 256 --ffn-hidden-size 1024 --num-attention-heads 8 --seq-length 128
--max-position-embeddings 128 --global-batch-size 8 --micro-batch-size 1 --train-iters 16"""
MOVING = "--copus --copus-layouts all"
_MOMENT = re.compile(r"\[(\d{4}-\d\d-\d\d \S+)\] iteration +(\d+)/.*?\(ms\): ([0-9.]+)")


def main(sections: list[str]) -> int:
    """Runs sections; without a name all."""
    if not since("0.19"):
        return _with_newest_core(sections)
    known: dict[str, Callable[[Path], dict[str, Any]]] = {
        "losses": losses,
        "round_trips": round_trips,
        "overhead": overhead,
        "restarts": restarts,
    }
    for name in sections or known:
        with tempfile.TemporaryDirectory() as folder:
            found = known[name](Path(folder))
        keep(name, found)
        print(json.dumps(found, indent=1), flush=True)
    return 0


def keep(section: str, found: dict[str, Any]) -> None:
    """Puts what a section has found into the file of results, beside what other sections and other
    releases have left there."""
    whole = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    versions, about = whole.get("versions", {}), origin()
    core = about["versions"]["megatron-core"]
    versions[core] = {**versions.get(core, {}), section: about}
    whole = {"what": WHAT, **whole, **found, "versions": versions}
    RESULT.write_text(json.dumps(whole, indent=1) + "\n")


def _with_newest_core(sections: list[str]) -> int:
    prepare = [sys.executable, "-m", "tests.newest_core.prepare"]
    beside = subprocess.run(prepare, check=True, capture_output=True, text=True).stdout.strip()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH"), beside]))
    again = [sys.executable, "-m", "bench.guest", *sections]
    return subprocess.run(again, env={**os.environ, "PYTHONPATH": path}).returncode


def losses(folder: Path) -> dict[str, Any]:
    """The largest relative difference of a printed loss, by seed."""
    by_seed = {}
    for seed in SEEDS:
        lists = [
            ",".join(f"{step}:{to if moves else HOME}:{b}:1" for step, (to, b) in WALK.items())
            for moves in (False, True)
        ]
        runs = [
            train(folder, f"{seed}.{i}", f"moving={x}", _seeded(f"{DENSE} {MOVING}", seed), ranks=4)
            for i, x in enumerate(lists)
        ]
        stayed, moved = ([row[4] for row in steps(run.stdout)] for run in runs)
        stayed += [loss for _, loss in evaluations(runs[0].stdout)]
        moved += [loss for _, loss in evaluations(runs[1].stdout)]
        assert len(stayed) == len(moved) > 15
        by_seed[seed] = max(abs(a - b) / b for a, b in zip(moved, stayed, strict=True))
    about = {"printed_digits": 7, "ranks": 4, "dtype": "fp32", "walk": WALK, "by_seed": by_seed}
    return {"largest_loss_difference": {"largest": max(by_seed.values()), **about}}


def round_trips(folder: Path) -> dict[str, Any]:
    """Whether steps, evaluations and the last checkpoint are those of the plain run, by seed."""
    moves = ",".join(f"{i}:{to}>{HOME}:8:1" for i, to in enumerate(AWAY, 2))
    by_seed = {}
    for seed in SEEDS:
        flags = f"{DENSE} --bf16 --dist-ckpt-optim-fully-reshardable {SPLIT} --train-iters 12"
        kinds = {"plain": "", "moving=" + moves: MOVING}
        outputs, saved = [], []
        for i, (kind, more) in enumerate(kinds.items()):
            done = train(folder, f"{seed}.{i}", kind, _seeded(f"{flags} {more}", seed), ranks=4)
            outputs.append((steps(done.stdout), evaluations(done.stdout)))
            saved.append(tensors(folder / f"{seed}.{i}" / "iter_0000012"))
        plain, own = saved
        is_state = plain.keys() == own.keys() and all(plain[k].equal(own[k]) for k in plain)
        by_seed[seed] = outputs[0] == outputs[1] and len(outputs[0][0]) == 12 and is_state
    about = {"layouts": AWAY, "dtype": "bf16", "num_tensors": len(plain), "by_seed": by_seed}
    return {"a_b_a_bit_equal": {"all": all(by_seed.values()), **about}}


def overhead(folder: Path) -> dict[str, Any]:
    """What a step takes more that is measured, and one that is not, while no change comes.

    Every other pair of steps goes without the controller. The second steps of neighbouring pairs
    are compared, as what is printed behind a step counts in the next one.
    """
    found: dict[str, Any] = {"num_pairs": 0, "seeds": SEEDS}
    for name, interval in (("measured", 1), ("between", 4 * TIMED_STEPS)):
        rows: list[dict[str, dict[str, float]]] = []
        settings = folder / f"{name}.yaml"
        settings.write_text(f"gns_interval: {interval}\n")
        for seed in SEEDS:
            flags = f"{LARGER} --train-iters {TIMED_STEPS} --copus --copus-mode observe"
            flags = f"{flags} --save-interval {2 * TIMED_STEPS} --copus-config {settings}"
            run = f"{name}{seed}"
            done = train(folder, run, "alternating", _seeded(flags, seed), ranks=2)
            took = {number: ms / 1e3 for number, _, ms in _moments(done.stdout)}
            for step in range(10, TIMED_STEPS - 2, 4):
                assert is_watched(step) and not is_watched(step + 2)
                rows.append({"copus": {"step_s": took[step]}, "plain": {"step_s": took[step + 2]}})
        found[name] = ratio_summary(rows, "step_s", of="copus", to="plain")
        found["num_pairs"] = len(rows)
    often, rarely = (found[name]["median_ratio"] - 1 for name in ("measured", "between"))
    found["share"] = rarely + (often - rarely) / LARGEST_INTERVAL
    return {"segment_overhead": {**found, "measured_one_step_in": LARGEST_INTERVAL}}


def restarts(folder: Path) -> dict[str, Any]:
    """From the end of a step to the start of the next under another layout, both ways."""
    rows: list[dict[str, dict[str, float]]] = []
    before, after = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
    for pair in range(PAIRS):
        kind, flags = "moving=6:tp1.pp2.dp1:8:1", f"{LARGER} {before} {MOVING}"
        moved = _moments(train(folder, f"m{pair}", kind, flags, ranks=2).stdout)
        place = f"{folder / f'r{pair}'}"
        flags = f"{LARGER} {before} --exit-interval 6"
        first = _moments(train(folder, f"r{pair}", "plain", flags, ranks=2).stdout)
        flags = f"{LARGER} {after} --load {place}"
        second = _moments(train(folder, f"r{pair}", "plain", flags, ranks=2).stdout)
        rows.append({"restart": _gap(first + second), "move": _gap(moved)})
    ratio = ratio_summary(rows, "pause_s", of="restart", to="move")
    return {"move_over_restart": {"median": ratio["median_ratio"], **ratio, "rows": rows}}


def _seeded(flags: str, seed: int) -> str:
    return f"{flags} --seed {seed}"


def _moments(output: str) -> list[tuple[int, datetime, float]]:
    """Number, end and milliseconds of every step."""
    return [
        (int(number), datetime.fromisoformat(moment), float(ms))
        for moment, number, ms in _MOMENT.findall(output)
    ]


def _gap(moments: list[tuple[int, datetime, float]]) -> dict[str, float]:
    """Seconds between the ends of steps 6 and 7 without a step of the new layout."""
    ends = {number: end for number, end, _ in moments}
    usual_s = statistics.median(ms for number, _, ms in moments if number > 8) / 1e3
    return {"pause_s": (ends[7] - ends[6]).total_seconds() - usual_s}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
