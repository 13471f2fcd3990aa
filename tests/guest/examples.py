"""Megatron-LM's own example scripts under `--copus`, from a checkout, on CPU ranks.

    python -m tests.guest.examples CHECKOUT [NAME ...] [--write]

What a CPU and a small size force is replaced and said; see `example_scripts.py`. Each runs plain,
under `--copus --copus-mode observe`, to other layouts and back at the same boundary, and with
changes of layout and batch, which are compared with the same batches on the layout that stays.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.guest.example_scripts import (
    BATCH,
    EXAMPLES,
    NUM_STEPS,
    Example,
    Flags,
    given_flags,
    scaled,
    with_others,
)
from tests.guest.program import RANK
from tests.guest.rank import use_checkout
from tests.helpers.launch import ROOT, RanksResult, run_ranks
from tests.newest_core.prepare import SITE

TOLERANCE = 1e-5
MOVES = "--copus --copus-layouts all --dist-ckpt-optim-fully-reshardable"


class Runs:
    """Runs of an example.

    Args:
        checkout: of Megatron-LM.
        folder: for what they write.
        ranks: on this machine.
    """

    def __init__(self, checkout: Path, folder: Path, ranks: int) -> None:
        self._script, self._folder, self._ranks = checkout / "pretrain_gpt.py", folder, ranks
        self.moves: list[str] = []
        """How each change of layout ended."""

    def start(self, name: str, kind: str, flags: Flags, more: str = "") -> RanksResult:
        """Runs the program; `kind` is that of `rank.py`, `more` comes behind the flags."""
        place = [str(self._folder / name)]
        own = flags | {"--save": place, "--load": place}
        words = [word for flag, values in own.items() for word in (flag, *values)]
        program = [RANK, self._script, kind, *words, *more.split()]
        return run_ranks(program, self._ranks, timeout_s=600, launcher="fresh")

    def steps(self, name: str, kind: str, flags: Flags, more: str = "") -> list[dict[str, str]]:
        """What the program prints of each step, by name, but for times."""
        rows, output = [], self.start(name, kind, flags, more).check().stdout
        self.moves += re.findall(r'^MOVE \{"kind": "(\w+)"', output, re.MULTILINE)
        for line in output.splitlines():
            if "consumed samples:" in line:
                parts = line[line.index("iteration") :].split("|")
                pairs = [part.split(":", 1) for part in parts if ":" in part]
                found = {name.strip(): value.strip() for name, value in pairs}
                rows.append({k: v for k, v in found.items() if not re.search("time|through", k)})
        return rows


def tried(checkout: Path, example: Example, folder: Path) -> dict[str, Any]:
    """Runs an example in all ways, and says what came out."""
    runs = Runs(checkout, folder, example.ranks)
    flags = scaled(example, given_flags(checkout, example, folder), folder)
    plain = runs.steps("plain", "plain", flags)
    observed = runs.steps("observed", "copus", flags, "--copus --copus-mode observe")
    if example.refused is not None:
        done = runs.start("refused", "copus", flags, f"{example.refused} {MOVES}")
        said = re.findall(r"(?:error|Error): (.*)", done.stdout + done.stderr)
        print(f"  with {example.refused or 'these flags'}: {said[:1]}", flush=True)
    still, acting = plain, with_others(flags, example.instead)
    if example.instead:
        print(f"  where it acts: {example.instead}", flush=True)
        still = runs.steps("still", "plain", acting)
    back = runs.steps("back", f"moving={there_and_back(example)}", acting, MOVES)
    # In fp32: each layout sums in another order, which rounds losses of 16 bits apart.
    whole = with_others(acting, dict.fromkeys(("--bf16", "--fp16", "--grad-reduce-in-bf16")))
    stayed, moved = (
        runs.steps(f"moved_{moves}", f"moving={changes(example, moves=moves)}", whole, MOVES)
        for moves in (False, True)
    )
    losses = [[float(row["lm loss"]) for row in rows] for rows in (moved, stayed)]
    batches = [[row["global batch size"] for row in rows] for rows in (moved, stayed)]
    assert len(plain) == len(back) == NUM_STEPS and batches[0] == batches[1], batches
    # Two to go and two to come back, and three that stay.
    assert runs.moves == ["moved"] * 7, runs.moves
    return {
        "script": example.script,
        "ranks": example.ranks,
        "steps": len(plain),
        "moves": len(runs.moves),
        "observe_equal": observed == plain,
        "there_and_back_equal": back == still,
        "layouts": [example.home, *(to for to, _ in example.moves.values())],
        "batches": [BATCH, *(batch for _, batch in example.moves.values())],
        "largest_loss_difference": max(abs(a - b) / b for a, b in zip(*losses, strict=True)),
    }


def changes(example: Example, *, moves: bool) -> str:
    """The example's changes as `moving.py` takes them, or those of the batch alone."""
    rows = example.moves.items()
    return ",".join(f"{i}:{to if moves else example.home}:{batch}:1" for i, (to, batch) in rows)


def there_and_back(example: Example) -> str:
    """To each of its layouts, and home again before the next step."""
    layouts = [to for to, _ in example.moves.values() if to != example.home]
    return ",".join(f"{i}:{to}>{example.home}:{BATCH}:1" for i, to in enumerate(layouts, 3))


def row(name: str, found: dict[str, Any]) -> str:
    """A line of a table."""
    equal = {True: "equal", False: "NOT EQUAL"}
    return (
        f"| {name} | {found['ranks']} ranks, {found['steps']} steps | observe: "
        f"{equal[found['observe_equal']]} | there and back: {equal[found['there_and_back_equal']]} "
        f"| {' > '.join(found['layouts'])}, batch {' > '.join(map(str, found['batches']))}: "
        f"{found['largest_loss_difference']:.1e} |"
    )


def write(checkout: Path, name: str, found: dict[str, Any]) -> None:
    """Puts a result under `examples` of the results of bench/guest."""
    use_checkout(checkout)
    from bench.guest import RESULT, keep

    before = json.loads(RESULT.read_text())["examples"] if RESULT.exists() else {}
    keep("examples", {"examples": {**before, name: found}})


def torch_problem() -> str:
    """Why this torch cannot stand in for CUDA on the CPU; empty if it can."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    return (
        f"torch {torch.__version__} is built for CUDA and finds no driver; these runs need torch's "
        "CPU build: COPUS_TORCH=cpu bash scripts/setup_env.sh run"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Megatron-LM's own examples under --copus")
    parser.add_argument("checkout", type=Path, help="of Megatron-LM; it stays as it is")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXAMPLES)}")
    parser.add_argument("--write", action="store_true", help="into docs/results/guest.json")
    given = parser.parse_args()
    if problem := torch_problem():
        parser.exit(2, f"error: {problem}\n")
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    checkout = given.checkout.resolve()
    if str(checkout) not in path:  # nothing of megatron-core is imported yet
        path = [str(ROOT), str(SITE), str(checkout), *filter(None, path)]
        again = [sys.executable, "-m", "tests.guest.examples", *sys.argv[1:]]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        return subprocess.run(again, env=env, check=False).returncode
    passes = []
    for name in given.names or EXAMPLES:
        print(f"{name}: {EXAMPLES[name].script}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            found = tried(checkout, EXAMPLES[name], Path(folder))
        print(row(name, found), flush=True)
        is_near = found["largest_loss_difference"] <= TOLERANCE
        passes.append(found["observe_equal"] and found["there_and_back_equal"] and is_near)
        if given.write:
            write(checkout, name, found)
    return 0 if all(passes) else 1


if __name__ == "__main__":
    sys.exit(main())
