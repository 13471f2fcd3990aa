"""Faults other than kills: each hurts a run under the supervisor once, and the run must go on.

`kills.py` has the kills.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.supervised_run import (
    INTERVAL,
    MOST_S,
    STEPS,
    Run,
    latest_of,
    num_launches,
    problems_at_end,
    process_names,
    send,
    step_of,
    wait_for_moment,
    wait_until,
)
from megatron.training.checkpoint import files
from tests.helpers.launch import free_port
from tests.helpers.two_nodes import DEVICE, HEAD, set_link, two_nodes
from tests.helpers.two_nodes import why_not as links_missing

_DISK_BYTES = 64 << 20
_WATCHDOG = {"COPUS_WATCHDOG_S": "2:6"}
_SECOND_LEAVES_S = 120.0
_HOLDER = re.compile(r"process \d+ on \S+, launch ")
_MBIT = 1000.0
Drawn = tuple[str, float, dict[str, Any]]
"""Moment, seconds after it, and what else a kind draws."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault of one run."""

    kind: str
    """Of `KINDS`."""
    number: int
    """Among those of its kind: with the seed it gives all that is drawn."""
    moment: str
    """See `wait_for_moment`."""
    after_s: float
    """From the moment."""
    is_async: bool
    """Whether the run saves beside its steps."""
    drawn: dict[str, Any]
    """What else belongs to a fault of this kind."""


@dataclass(kw_only=True)
class FaultOutcome:
    """What came of a fault."""

    what: str
    """That was done, and when; empty if the run was over before."""
    seconds: float | None = None
    """See `Kind.seconds_are`."""
    problems: list[str] = field(default_factory=list)
    """Beside those that the end of the run shows."""
    winner: Run | None = None
    """The run that goes on to the end, if it is not the one that was hurt."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A class of faults."""

    draw: Callable[[random.Random, bool], Drawn]
    """Gives moment, seconds after it, and what else there is to draw, of one variety for even
    numbers and of another for odd ones."""
    inject: Callable[[Run, Case], FaultOutcome]
    """Does it to a run that has just been started, and waits until it has got over it."""
    seconds_are: str
    """From where to where they go."""
    make: Callable[[Case, Path, list[str]], contextlib.AbstractContextManager[Run]]
    """Gives the run, not yet started."""
    why_not: Callable[[], str] = lambda: ""
    """Why it cannot be done here; empty if it can."""


def moment(rng: random.Random, *, start_s: float = 0.0) -> tuple[str, float]:
    """One of those that every run comes to early enough to see what follows."""
    names = ["steps", "save", "commit", "evaluation", *["start"] * (start_s > 0)]
    moment = rng.choice(names)
    return moment, rng.uniform(0, {"steps": 2.0, "start": start_s}.get(moment, 0.05))


def after(began_s: float, came: bool) -> float | None:
    """Seconds since then, if what was waited for came."""
    return time.monotonic() - began_s if came else None


def wait_for_progress(run: Run, launches: int = 0) -> tuple[float | None, list[str]]:
    """Waits for a further step, of a further launch if `launches` are known; seconds to it."""
    began_s, known = time.monotonic(), len(run.records())

    def is_on() -> bool:
        new = run.records()[known:]
        return num_launches(run) > launches and any(r.get("kind") == "step" for r in new)

    came = wait_until(lambda: run.code is not None or is_on(), MOST_S)
    problems = [] if came else ["it does not go on"]
    return after(began_s, came and run.code is None), problems


def only_launch(run: Run) -> list[str]:
    """That it had no need to start again is known only at its end."""
    run.finish()
    again = [line for line in run.log.splitlines() if line.startswith("supervisor: ")]
    return [f"started again: {again}"] if num_launches(run) != 1 else []


@contextlib.contextmanager
def plain(case: Case, folder: Path, flags: list[str]) -> Iterator[Run]:
    """A run as it is."""
    yield Run(folder, flags)


def _draw_disk(rng: random.Random, is_odd: bool) -> Drawn:
    moment = rng.choice(["steps", "save", "evaluation"])
    failures = 2 if is_odd else 1
    return moment, rng.uniform(0, 1.0 if moment == "steps" else 0.02), {"failures": failures}


def _disk_missing() -> str:
    if os.geteuid():
        return "this needs root, to mount a small file system"
    made = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True)
    return f"this needs mounts: {made.stderr.strip()}" if made.returncode else ""


@contextlib.contextmanager
def _on_small_disk(case: Case, folder: Path, flags: list[str]) -> Iterator[Run]:
    """A run in a file system of its own, which a guard takes away however this process ends."""
    may_stop = case.drawn["failures"] == 1
    run = Run(folder, [*flags, "--on-save-failure", "stop" if may_stop else "continue"])
    run.save.mkdir()
    size = ["-o", f"size={_DISK_BYTES}"]
    guard = subprocess.Popen(
        ["sh", "-c", 'cat >/dev/null; umount -l "$0"', run.save],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        subprocess.run(["mount", "-t", "tmpfs", *size, "copus-fault", run.save], check=True)
        yield run
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        guard.wait()


def _fill_disk(run: Run, case: Case) -> FaultOutcome:
    """Leaves no byte, until a number of saves have failed."""
    if not wait_for_moment(run, case.moment, case.after_s):
        return FaultOutcome(what="")
    step, before = step_of(run), set(files.complete_iterations(run.save))
    ballast = run.save / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    alert, wanted = "ALERT: saving iteration", case.drawn["failures"]
    failed = wait_until(lambda: run.code is not None or run.log.count(alert) >= wanted, MOST_S)
    seen = FaultOutcome(what=f"full from step {step} on")
    if not failed or run.code is not None:
        seen.problems.append(f"{run.log.count(alert)} failed saves were told, not {wanted}")
    kept = set(files.complete_iterations(run.save))
    if not before <= kept or latest_of(run) not in (kept or {None}):
        seen.problems.append(f"of checkpoints {before} {kept} are left, {latest_of(run)} is latest")
    latest, began_s = latest_of(run), time.monotonic()
    ballast.unlink()
    saved = wait_until(lambda: run.code is not None or latest_of(run) != latest, MOST_S)
    seen.seconds = after(began_s, saved)
    seen.problems += only_launch(run)
    return seen


def _draw_clock(rng: random.Random, is_odd: bool) -> Drawn:
    hours = rng.choice([-1, 1]) * rng.choice([0.5, 3.0, 48.0]) * rng.uniform(0.5, 1.0)
    return *moment(rng, start_s=6.0), {"hours": hours, "kills": is_odd}


def _clock_missing() -> str:
    if shutil.which("cc") is None or sys.platform != "linux":
        return "this needs Linux and a C compiler, cc, for bench/faults/own_clock.c"
    return ""


@contextlib.contextmanager
def _with_own_clock(case: Case, folder: Path, flags: list[str]) -> Iterator[Run]:
    """A run whose wall clock is the machine's and what a file says; monotonic clocks and the stamps
    of files, which are a file server's, stay."""
    library, clock = folder / "own_clock.so", folder / "clock"
    run = Run(folder, flags, env={"LD_PRELOAD": str(library), "COPUS_TEST_CLOCK": str(clock)})
    source = Path(__file__).with_name("own_clock.c")
    compiler = ["cc", "-O1", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(compiler, check=True, capture_output=True)
    clock.write_bytes(bytes(8))
    yield run


def _step_clock(run: Run, case: Case) -> FaultOutcome:
    if not wait_for_moment(run, case.moment, case.after_s):
        return FaultOutcome(what="")
    step, hours = step_of(run), case.drawn["hours"]
    seconds = round(3600 * hours)
    with (run.folder / "clock").open("r+b", buffering=0) as file:
        file.write(struct.pack("=q", seconds))
    kills, launches = case.drawn["kills"], num_launches(run)
    seen = FaultOutcome(what=f"{hours:+.1f} h at step {step}" + ", then rank 0 killed" * kills)
    if kills:
        for pid in run.find("rank 0"):
            send(pid, signal.SIGKILL)
        seen.seconds, seen.problems = wait_for_progress(run, launches)
        run.finish()
    else:
        seen.seconds, seen.problems = wait_for_progress(run)
        seen.problems += only_launch(run)
    last = run.records()[-1]["t"] - time.time()
    if abs(last - seconds) > MOST_S:
        seen.problems.append(f"the clock of the run was {last:.0f} s ahead, not {seconds}")
    return seen


class TwoNodes(Run):
    """One rank and a supervisor on each.

    Args:
        names: of the nodes.
        folder: see `Run`.
        flags: see `Run`.
    """

    def __init__(self, names: tuple[str, str], folder: Path, flags: Sequence[str]) -> None:
        super().__init__(folder, flags, env={"GLOO_SOCKET_IFNAME": DEVICE})
        self._names = names
        self._second: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """The command on both."""
        self.starts += 1
        shared = ["--nnodes", "2", "--nproc-per-node", "1"]
        shared += ["--rdzv-endpoint", f"{HEAD}:{free_port()}"]
        self._child, self._second = (
            self.spawn([*shared, "--node-rank", str(node)], ["ip", "netns", "exec", name])
            for node, name in enumerate(self._names)
        )

    def end(self) -> None:
        """Kills what is left on both."""
        super().end()
        if self._second is not None:
            self._second.wait()

    def set_link(self, state: str) -> None:
        """Takes the link `down` or `up`."""
        set_link(self._names[0], state)


@contextlib.contextmanager
def _on_two_nodes(case: Any, folder: Path, flags: list[str]) -> Iterator[Run]:
    """A run on two nodes that wait for a minute only."""
    with two_nodes(_MBIT) as names:
        yield TwoNodes(names, folder, [*flags, "--distributed-timeout-minutes", "1"])


def _draw_link(rng: random.Random, is_odd: bool) -> Drawn:
    down_s = rng.uniform(70, 120) if is_odd else 5.0
    return *moment(rng), {"down_s": down_s}


def _cut_link(run: Run, case: Case) -> FaultOutcome:
    if not wait_for_moment(run, case.moment, case.after_s):
        return FaultOutcome(what="")
    assert isinstance(run, TwoNodes)
    step, down_s = step_of(run), case.drawn["down_s"]
    run.set_link("down")
    time.sleep(down_s)
    run.set_link("up")
    seen = FaultOutcome(what=f"down for {down_s:.0f} s at step {step}")
    seen.seconds, seen.problems = wait_for_progress(run)
    if down_s < 30:
        seen.problems += only_launch(run)
    return seen


def _draw_stop(rng: random.Random, is_odd: bool) -> Drawn:
    more = {"victim": rng.choice(["rank 0", "rank 1"]), "goes_on_s": None}
    if is_odd:
        more["goes_on_s"] = rng.uniform(1, 6)
    return *moment(rng, start_s=0.0 if more["goes_on_s"] is None else 8.0), more


@contextlib.contextmanager
def _watched(case: Case, folder: Path, flags: list[str]) -> Iterator[Run]:
    is_left = case.drawn["goes_on_s"] is None
    flags = [*flags, "--distributed-timeout-minutes", "1"]
    yield Run(folder, flags, env=_WATCHDOG if is_left else None)


def _stop_rank(run: Run, case: Case) -> FaultOutcome:
    if not wait_for_moment(run, case.moment, case.after_s):
        return FaultOutcome(what="")
    step, launches = step_of(run), num_launches(run)
    victims, wait_s = run.find(case.drawn["victim"]), case.drawn["goes_on_s"]
    for pid in victims:
        send(pid, signal.SIGSTOP)
    if not victims:
        return FaultOutcome(what="")
    seen = FaultOutcome(what=f"{case.drawn['victim']} stopped at step {step}")
    if wait_s is None:
        seen.seconds, seen.problems = wait_for_progress(run, launches)
        said = "exits with 86" if "and exits with 86" in run.log else "a collective's time-out"
        seen.what += f", seen by {said}"
        if "was ended by SIGKILL" in run.log or " hung: it did not answer" not in run.log:
            seen.problems.append("what was told is not that it hung")
    else:
        time.sleep(wait_s)
        for pid in victims:
            send(pid, signal.SIGCONT)
        seen.seconds, seen.problems = wait_for_progress(run)
        seen.what += f" for {wait_s:.1f} s"
        seen.problems += only_launch(run)
    return seen


def _draw_signals(rng: random.Random, is_odd: bool) -> Drawn:
    name = "SIGUSR1" if is_odd else "SIGTERM"
    more = {"signal": name, "again_s": rng.uniform(0, 0.5) if name == "SIGUSR1" else None}
    return *moment(rng, start_s=8.0), more


def _signal_supervisor(run: Run, case: Case) -> FaultOutcome:
    """It saves and leaves with 85; the same command goes on."""
    if not wait_for_moment(run, case.moment, case.after_s):
        return FaultOutcome(what="")
    name, again_s = case.drawn["signal"], case.drawn["again_s"]
    number, began_s = getattr(signal, name), time.monotonic()
    began_at = step_of(run)
    seen = FaultOutcome(what=f"{name}{' twice' if again_s is not None else ''} at step {began_at}")
    for pid in run.find("supervisor"):
        send(pid, number)
        if again_s is not None:
            time.sleep(again_s)
            send(pid, number)
    code, left_at = run.finish(), step_of(run)
    seen.seconds = after(began_s, code is not None)
    # Before the ranks can save there is nothing to save, and the signal is passed on.
    allowed = (85,) if began_at else (85, 128 + number)
    if code == 0 and left_at == STEPS:
        return seen
    if code not in allowed:
        seen.problems.append(f"left with {code}")
    if began_at and latest_of(run) != left_at:
        seen.problems.append(f"left after step {left_at} with checkpoint {latest_of(run)}")
    if not run.gone():
        seen.problems.append(f"left behind: {process_names(run)}")
    run.end()
    run.start()
    return seen


def _draw_damage(rng: random.Random, is_odd: bool) -> Drawn:
    more = {
        "way": "cut" if is_odd else "flip",
        "checkpoints": rng.randint(2, STEPS // INTERVAL - 1),
        "killed": rng.choice(["all", "rank 0", "rank 1"]),
        "file": rng.random(),
        "place": rng.random(),
        "mask": rng.randint(1, 255),
    }
    return "commit", 0.0, more


def _spoil(folder: Path, more: dict[str, Any]) -> Path:
    """Flips a byte of a file of a checkpoint, or cuts it."""
    names = sorted(path for path in folder.iterdir() if path.stat().st_size)
    path = names[int(more["file"] * len(names))]
    at = int(more["place"] * path.stat().st_size)
    if more["way"] == "cut":
        os.truncate(path, at)
    else:
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(1)[0]
            file.seek(at)
            file.write(bytes([old ^ more["mask"]]))
    return path


def _damage(run: Run, case: Case) -> FaultOutcome:
    """The newest checkpoint changes as the run is killed: the one before it is taken, or, from a
    manifest that still says the same, the damaged one."""
    more = case.drawn
    enough = lambda: len(files.complete_iterations(run.save)) >= more["checkpoints"]  # noqa: E731
    wait_until(lambda: run.code is not None or (enough() and latest_of(run) is not None), MOST_S)
    victims, all_of_it = run.find(more["killed"]), run.find("all")
    if run.code is not None or not victims:
        return FaultOutcome(what="")
    launches = num_launches(run)
    for pid in all_of_it:  # so that the newest stays the newest
        send(pid, signal.SIGSTOP)
    latest = latest_of(run)
    assert latest is not None
    spoilt = _spoil(files.folder_of(run.save, latest), more)
    for pid in victims:
        send(pid, signal.SIGKILL)
    for pid in all_of_it:
        send(pid, signal.SIGCONT)
    seen = FaultOutcome(
        what=f"{more['way']} in {spoilt.parent.name}/{spoilt.name}, {more['killed']} killed"
    )
    if more["killed"] == "all":
        if not run.gone():
            seen.problems.append(f"processes are left: {process_names(run)}")
        run.end()
        run.start()
    seen.seconds, problems = wait_for_progress(run, launches)
    seen.problems += problems
    run.finish()
    told = f"{spoilt.parent.name}" in run.log and "; going on from iteration" in run.log
    if not told and spoilt.name != files.MANIFEST:
        seen.problems.append(f"{seen.what} was not told")
    return seen


def _draw_second(rng: random.Random, is_odd: bool) -> Drawn:
    return *moment(rng, start_s=8.0), {}


def _start_second(run: Run, case: Case) -> FaultOutcome:
    """One of both is refused and names the other. While a run is not yet there it is open which."""
    if not wait_for_moment(run, case.moment, case.after_s):
        return FaultOutcome(what="")
    is_early = num_launches(run) == 0
    seen = FaultOutcome(what=f"at step {step_of(run)}")
    other = Run(run.folder, ["--async-save"] * case.is_async, log="second")
    began_s = time.monotonic()
    try:
        other.start()
        wait_until(lambda: other.code is not None or run.code is not None, _SECOND_LEAVES_S)
        if run.code == 0 and other.code is None:
            return FaultOutcome(
                what=""
            )  # nobody is there to refuse it, and it finds that all is done
        refused, seen.winner = (other, run) if other.code is not None else (run, other)
        seen.seconds = after(began_s, refused.code is not None)
        if refused is run and not is_early:
            seen.problems.append(f"the second was not refused: {other.log[-600:]}")
        elif refused.code not in (1, 2) or not _HOLDER.search(refused.log):
            seen.problems.append(f"refused with {refused.code}: {refused.log[-600:]}")
        seen.problems += only_launch(seen.winner)
        for one in (run, other):
            if not one.gone():
                seen.problems.append(f"left behind: {process_names(one)}")
    finally:
        other.end()
    return seen


KINDS = {
    "disk": Kind(
        draw=_draw_disk,
        inject=_fill_disk,
        seconds_are="from the room made to the next checkpoint",
        make=_on_small_disk,
        why_not=_disk_missing,
    ),
    "clock": Kind(
        draw=_draw_clock,
        inject=_step_clock,
        seconds_are="from the jump to the next step, of a new launch where a rank was killed",
        make=_with_own_clock,
        why_not=_clock_missing,
    ),
    "link": Kind(
        draw=_draw_link,
        inject=_cut_link,
        seconds_are="from the link's return to the next step",
        make=_on_two_nodes,
        why_not=links_missing,
    ),
    "stop": Kind(
        draw=_draw_stop,
        inject=_stop_rank,
        seconds_are="from the stop to a step of the next launch, or from going on to a step",
        make=_watched,
    ),
    "signals": Kind(
        draw=_draw_signals,
        inject=_signal_supervisor,
        seconds_are="from the signal to the end of the supervisor",
        make=plain,
    ),
    "damage": Kind(
        draw=_draw_damage,
        inject=_damage,
        seconds_are="from the kill, or the start after it, to a step of the next launch",
        make=plain,
    ),
    "second": Kind(
        draw=_draw_second,
        inject=_start_second,
        seconds_are="from the second start to its refusal",
        make=plain,
    ),
}


def drawn(kind: str, seed: int, number: int) -> Case:
    """The case of a number, the same whatever else is drawn."""
    rng = random.Random(f"{seed} {kind} {number}")
    moment, after_s, more = KINDS[kind].draw(rng, number % 2 == 1)
    return Case(
        kind=kind,
        number=number,
        moment=moment,
        after_s=after_s,
        is_async=rng.random() < 0.5,
        drawn=more,
    )


def run_case(case: Case, folder: Path, reference: list[Any]) -> dict[str, Any]:
    """Hurts a run once and looks at its end.

    Args:
        case: what to do.
        folder: new.
        reference: `history` of the run that nobody hurt.

    Returns:
        A row: the case, what was done, seconds, problems (empty if all is well).
    """
    began = time.monotonic()
    kind = KINDS[case.kind]
    with kind.make(case, folder, ["--async-save"] * case.is_async) as run:
        try:
            run.start()
            seen = kind.inject(run, case)
            last = seen.winner or run
            problems = seen.problems + problems_at_end(last, reference)
            if problems:
                problems.append(f"the log ends with: {last.log[-1500:]}")
            launches = num_launches(run)
        finally:
            run.end()
    return {
        **asdict(case),
        "what": seen.what or "nobody was there",
        "seconds": seen.seconds,
        "problems": problems,
        "launches": launches,
        "wall_s": time.monotonic() - began,
    }
