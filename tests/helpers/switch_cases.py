"""Runs that change their layout and are broken while they do, and are then started again."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.distributed.worker_switch_faults import PATIENCE_S, SMALL, TIMEOUT_S, TO, topics
from tests.helpers.jobs import steps_of, train
from tests.helpers.launch import ROOT, RanksResult, run_ranks

WORKER = ROOT / "tests" / "distributed" / "worker_switch_faults.py"
INTERVAL, STEPS = 2, 6
RELAUNCH = 85
LONGEST_S = 2 * TIMEOUT_S + 3 * PATIENCE_S + 10
"""From what went wrong to the end of the last rank."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What goes wrong in a run, and where."""

    topic: str
    """Part of a phase."""
    kind: str
    """See `strike` of the worker."""
    rank: int
    """Where."""
    at: int = 4
    """Step after which the layout is changed; a multiple of the save interval or not."""
    to: str = "tp"
    """Layout to change to."""
    back_from: str = ""
    """For a topic of the way back: where that begins."""
    is_async: bool = False
    """With saves beside the steps."""

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} at {self.topic!r} after step {self.at}"


def flags_of(save: Path, *, is_async: bool) -> list[str]:
    """Of every run here."""
    counts = ["--train-iters", str(STEPS), "--save-interval", str(INTERVAL)]
    return [*counts, "--save", str(save), "--load", str(save), *["--async-save"] * is_async]


def uninterrupted(folder: Path) -> list[Any]:
    """Steps of the run that never tries."""
    train(flags_of(folder / "save", is_async=False), 2, folder / "run", base=SMALL).check()
    return history(folder / "run")


def history(run: Path) -> list[Any]:
    """What the steps of a run's committed history must have in common with another's."""
    fields = ("iteration", "losses", "grad_norm", "learning_rate", "consumed_samples")
    return [[step[field] for field in fields] for step in steps_of(run)]


def run_case(case: Case, folder: Path, whole: list[Any], *, ranks: int = 2) -> dict[str, Any]:
    """Breaks a run, starts it again, and looks at what it left.

    Args:
        case: what goes wrong.
        folder: empty.
        whole: see `uninterrupted`.
        ranks: of the run.

    Returns:
        What was seen; `problems` is empty if all is well.
    """
    from megatron.training import checkpoint_files as files

    save, run = folder / "save", folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    flags = flags_of(save, is_async=case.is_async)
    text = json.dumps({**asdict(case), "output": str(folder)})
    command = [WORKER, "one", text, *SMALL.split(), *flags, "--run-dir", run]
    broken = run_ranks(command, ranks, timeout_s=LONGEST_S + 60, launcher="direct", ends_all=False)
    ended = time.time()
    problems = _problems_of_end(case, broken, folder)
    struck = folder / "struck"
    seconds = ended - float(struck.read_text()) if struck.exists() else None
    if seconds is not None and seconds > LONGEST_S:
        problems.append(f"the last rank left after {seconds:.0f} s")
    latest = files.read_latest(save)
    last = case.at - case.at % INTERVAL
    if latest is None or latest not in ((last, last - INTERVAL) if case.is_async else (last,)):
        problems.append(f"the last checkpoint is of iteration {latest}")
    else:
        problems += files.damage(files.folder_of(save, latest))
    again = train(flags, ranks, run, base=SMALL, timeout_s=120)
    if again.returncode or f"(iteration {latest})" not in again.stdout:
        problems.append(f"not resumed from iteration {latest}: {again.tail()}")
    elif history(run) != whole:
        problems.append("the steps differ from those of the uninterrupted run")
    return {
        **asdict(case),
        "codes": list(broken.codes),
        "seconds_to_leave": seconds,
        "orphans": broken.orphans,
        "resumed_from": latest,
        "seconds": [broken.wall_s, again.wall_s],
        "problems": problems,
    }


def _problems_of_end(case: Case, result: RanksResult, folder: Path) -> list[str]:
    """How the ranks ended, against how they must."""
    wanted = [RELAUNCH] * len(result.codes)
    if case.kind == "kill":
        wanted[case.rank] = -signal.SIGKILL
    problems = []
    if list(result.codes) != wanted:
        problems.append(f"exit codes {list(result.codes)}: {result.tail()}")
    if not (folder / "struck").exists():
        problems.append(f"nothing went wrong: {result.tail()}")
    return problems


def drawn(seed: int, num: int, *, ranks: int = 2) -> list[Case]:
    """Kills on any rank at any place, every place about equally often."""
    chance = random.Random(seed)
    there = [*topics(waiting=False), *topics(waiting=True), "resume"]
    back = [
        f"back: {t}" for t in there if not t.startswith(("prepare", "drain", "extract", "comm"))
    ]
    places = [*there, *back]
    cases = []
    while len(cases) < num:
        chance.shuffle(places)
        for topic in places[: num - len(cases)]:
            case = Case(
                topic=topic,
                kind="kill",
                rank=chance.randrange(ranks),
                at=chance.choice((3, 4)),
                to=chance.choice(list(TO)),
                back_from="verify" if topic.startswith("back") else "",
                is_async=chance.random() < 0.5,
            )
            cases.append(case)
    return cases
