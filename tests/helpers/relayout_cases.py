"""Runs that change their layout and are broken while they do, and are then started again."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.trainer.checkpoint import files
from tests.distributed.worker_relayout_faults import PATIENCE_S, SMALL, TIMEOUT_S, TO, topics
from tests.helpers.jobs import steps_of, train
from tests.helpers.launch import ROOT, RanksResult, run_ranks

WORKER = ROOT / "tests" / "distributed" / "worker_relayout_faults.py"
INTERVAL, STEPS, CHAIN = 2, 12, 5
"""Steps between saves, of a run, and how often a run is broken."""
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
    is_late: bool = False
    """The change comes a step after the save, not at the same boundary."""
    to: str = "tp"
    """Layout to change to."""
    back_from: str = ""
    """For a topic of the way back: where that begins."""
    is_async: bool = False
    """With saves beside the steps."""

    def __str__(self) -> str:
        return f"{self.kind} on rank {self.rank} at {self.topic!r}"


def flags_of(save: Path, *, is_async: bool) -> list[str]:
    """Of every run here."""
    counts = ["--train-iters", str(STEPS), "--save-interval", str(INTERVAL)]
    return [*counts, "--save", str(save), "--load", str(save), *["--async-save"] * is_async]


def uninterrupted(folder: Path, *, more: str = "") -> list[Any]:
    """Steps of the run that never tries, with further flags."""
    flags = [*flags_of(folder / "save", is_async=False), *more.split()]
    train(flags, 2, folder / "run", base=SMALL).check()
    return history(folder / "run")


def history(run: Path) -> list[Any]:
    """What the steps of a run's committed history must have in common with another's."""
    fields = ("iteration", "losses", "grad_norm", "learning_rate", "consumed_samples")
    return [[step[field] for field in fields] for step in steps_of(run)]


def run_chain(
    cases: list[Case], folder: Path, whole: list[Any], *, ranks: int = 2, more: str = ""
) -> list[dict[str, Any]]:
    """Breaks a run, starts it again, breaks it in another way and so on, and looks at what it left.

    Args:
        cases: what goes wrong, at most `CHAIN` of them.
        folder: new.
        whole: see `uninterrupted`.
        ranks: of the run.
        more: further flags of it.

    Returns:
        What was seen, a row for each case; its `problems` are empty if all is well.
    """
    assert len(cases) <= CHAIN
    save, run = folder / "save", folder / "run"
    rows: list[dict[str, Any]] = []
    latest: int | None = None
    for number, case in enumerate(cases):
        place = folder / str(number)
        place.mkdir(parents=True)
        at = INTERVAL * (number + 1) + case.is_late
        text = json.dumps({**asdict(case), "at": at, "output": str(place)})
        flags = [*flags_of(save, is_async=case.is_async), *more.split()]
        broken = run_ranks(
            [WORKER, text, *SMALL.split(), *flags, "--run-dir", run],
            ranks,
            timeout_s=LONGEST_S + 120,
            launcher="direct",
            ends_all=False,
        )
        ended = time.time()
        if rows:
            rows[-1]["problems"] += _problems_of_load(latest, broken)
        problems = _problems_of_end(case, broken, place)
        struck = place / "struck"
        seconds = ended - float(struck.read_text()) if struck.exists() else None
        if seconds is not None and seconds > LONGEST_S:
            problems.append(f"the last rank left after {seconds:.0f} s")
        latest = files.read_latest(save)
        last = at - at % INTERVAL
        if (latest or 0) not in ((last, last - INTERVAL) if case.is_async else (last,)):
            problems.append(f"the last checkpoint is of iteration {latest}")
        if latest is not None:
            problems += files.damage(files.folder_of(save, latest))
        rows.append(
            {
                **asdict(case),
                "at": at,
                "codes": list(broken.codes),
                "seconds_to_leave": seconds,
                "orphans": broken.orphans,
                "resumed_from": latest,
                "seconds": broken.wall_s,
                "problems": problems,
            }
        )
    flags = [*flags_of(save, is_async=False), *more.split()]
    again = train(flags, ranks, run, base=SMALL)
    rows[-1]["problems"] += _problems_of_load(latest, again)
    if again.returncode or history(run) != whole:
        for row in rows:
            row["problems"].append("in the end the steps were not those of the uninterrupted run")
    return rows


def _problems_of_load(latest: int | None, result: RanksResult) -> list[str]:
    """Whether a launch went on from a checkpoint, or from the start if there was none."""
    expected = "starting from scratch" if latest is None else f"(iteration {latest})"
    if expected in result.stdout:
        return []
    return [f"not resumed from iteration {latest}: {result.tail()}"]


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
    # The way back begins with `tear down`, and each rank has all that it needs.
    missing = ("prepare", "drain", "extract", "commit", "transfer")
    back = [f"back: {t}" for t in there if not t.startswith(missing)]
    places = [*there, *back]
    cases = []
    while len(cases) < num:
        chance.shuffle(places)
        for topic in places[: num - len(cases)]:
            case = Case(
                topic=topic,
                kind="kill",
                rank=chance.randrange(ranks),
                is_late=chance.random() < 0.5,
                to=chance.choice(list(TO)),
                back_from="verify" if topic.startswith("back") else "",
                is_async=chance.random() < 0.5,
            )
            cases.append(case)
    return cases
