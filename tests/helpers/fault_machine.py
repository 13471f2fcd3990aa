"""Faults of the machine around a run: its disk, its clock, its network."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.training.checkpoint import files
from tests.helpers import fault_links
from tests.helpers.fault_drawn import Case, Kind, Seen, after, goes_on, moment, only_launch
from tests.helpers.fault_runs import (
    MOST_S,
    Run,
    come,
    latest_of,
    num_launches,
    send,
    step_of,
    wait_until,
)

_DISK_BYTES = 64 << 20


def _draw_disk(rng: random.Random, is_odd: bool) -> tuple[str, float, dict[str, Any]]:
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
    run = Run(folder, [*flags, "--copus-on-save-failure", "stop" if may_stop else "continue"])
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


def _fill_disk(run: Run, case: Case) -> Seen:
    """Leaves no byte, until a number of saves have failed."""
    if not come(run, case.moment, case.after_s):
        return Seen(what="")
    step, before = step_of(run), set(files.complete_iterations(run.save))
    ballast = run.save / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    alert, wanted = "ALERT: saving iteration", case.drawn["failures"]
    failed = wait_until(lambda: run.code is not None or run.log.count(alert) >= wanted, MOST_S)
    seen = Seen(what=f"full from step {step} on")
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


def _draw_clock(rng: random.Random, is_odd: bool) -> tuple[str, float, dict[str, Any]]:
    hours = rng.choice([-1, 1]) * rng.choice([0.5, 3.0, 48.0]) * rng.uniform(0.5, 1.0)
    return *moment(rng, start_s=6.0), {"hours": hours, "kills": is_odd}


def _clock_missing() -> str:
    if shutil.which("cc") is None or sys.platform != "linux":
        return "this needs Linux and a C compiler, cc, for tests/helpers/own_clock.c"
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


def _step_clock(run: Run, case: Case) -> Seen:
    if not come(run, case.moment, case.after_s):
        return Seen(what="")
    step, hours = step_of(run), case.drawn["hours"]
    seconds = round(3600 * hours)
    with (run.folder / "clock").open("r+b", buffering=0) as file:
        file.write(struct.pack("=q", seconds))
    kills, launches = case.drawn["kills"], num_launches(run)
    seen = Seen(what=f"{hours:+.1f} h at step {step}" + ", then rank 0 killed" * kills)
    if kills:
        for pid in run.find("rank 0"):
            send(pid, signal.SIGKILL)
        seen.seconds, seen.problems = goes_on(run, launches)
        run.finish()
    else:
        seen.seconds, seen.problems = goes_on(run)
        seen.problems += only_launch(run)
    last = run.records()[-1]["t"] - time.time()
    if abs(last - seconds) > MOST_S:
        seen.problems.append(f"the clock of the run was {last:.0f} s ahead, not {seconds}")
    return seen


def _draw_link(rng: random.Random, is_odd: bool) -> tuple[str, float, dict[str, Any]]:
    down_s = rng.uniform(70, 120) if is_odd else 5.0
    return *moment(rng), {"down_s": down_s}


def _cut_link(run: Run, case: Case) -> Seen:
    if not come(run, case.moment, case.after_s):
        return Seen(what="")
    assert isinstance(run, fault_links.TwoNodes)
    step, down_s = step_of(run), case.drawn["down_s"]
    run.set_link("down")
    time.sleep(down_s)
    run.set_link("up")
    seen = Seen(what=f"down for {down_s:.0f} s at step {step}")
    seen.seconds, seen.problems = goes_on(run)
    if down_s < 30:
        seen.problems += only_launch(run)
    return seen


MACHINE = {
    "disk": Kind(
        draw=_draw_disk,
        hurt=_fill_disk,
        seconds_are="from the room made to the next checkpoint",
        make=_on_small_disk,
        why_not=_disk_missing,
    ),
    "clock": Kind(
        draw=_draw_clock,
        hurt=_step_clock,
        seconds_are="from the jump to the next step, of a new launch where a rank was killed",
        make=_with_own_clock,
        why_not=_clock_missing,
    ),
    "link": Kind(
        draw=_draw_link,
        hurt=_cut_link,
        seconds_are="from the link's return to the next step",
        make=fault_links.on_two_nodes,
        why_not=fault_links.why_not,
    ),
}
