"""The launcher of the distributed tests: a hung rank shows its stack and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.helpers import processes
from tests.helpers.launch import ROOT, RanksHung, run_ranks

pytestmark = pytest.mark.waits
PROGRAM = """
import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
print("sum", int(value))

def stays_away():
    time.sleep(600)

if os.environ.get("HANG") == os.environ["RANK"]:
    stays_away()
dist.all_reduce(value)
dist.destroy_process_group()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_ranks_get_their_numbers_and_output_is_kept(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys
        print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["EXTRA"], sys.argv[1])
        print("err", file=sys.stderr)
        """,
    )
    env = {"EXTRA": "x"}
    result = run_ranks([path, "--flag"], 3, timeout_s=20, env=env, launcher="direct").check()
    assert sorted(result.stdout.split("\n")[:-1]) == [f"{r} 3 x --flag" for r in range(3)]
    assert result.stderr.count("err") == 3


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_lines_of_different_ranks_do_not_mix(tmp_path: Path, unbuffered: str) -> None:
    path = script(
        tmp_path,
        f"""
        import os, pathlib, time
        begun, between = (pathlib.Path({str(tmp_path)!r}, name) for name in ("begun", "between"))

        def wait_for(file):
            while not file.exists():
                time.sleep(0.01)

        if os.environ["RANK"] == "0":
            print("first ", end="")
            begun.touch()
            wait_for(between)
            print("rank")
        else:
            wait_for(begun)
            print("second rank")
            between.touch()
        """,
    )
    env = {"PYTHONUNBUFFERED": unbuffered}
    result = run_ranks(path, 2, timeout_s=20, env=env, launcher="direct").check()
    assert result.stdout == "second rank\nfirst rank\n"


def test_a_forked_rank_is_as_clean_as_a_fresh_one(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import atexit, os, pathlib, sys, threading
        ours = [m for m in sys.modules if m.startswith(("megatron.trainer", "copus_ext"))]
        print("ours", ours, "threads", threading.active_count(), "main", __name__, __file__)
        print("path", sys.path[0], "cwd", os.getcwd(), "old", os.environ.get("FIRST"))
        atexit.register(lambda: print("atexit ran"))
        os.environ["FIRST"] = "1"
        if "torch" in sys.modules:
            print("forked")
        """,
    )
    told = [
        run_ranks(path, 1, timeout_s=60, launcher=launcher, cwd=tmp_path).check().stdout
        for launcher in ("fresh", "direct", "direct")
    ]
    fresh, first, second = told
    assert "ours [] threads 1 main __main__" in fresh and "old None" in fresh
    assert fresh.endswith("atexit ran\n")
    assert first == second == fresh.replace("atexit ran", "forked\natexit ran")


def test_a_forked_rank_ends_as_a_fresh_one_does(tmp_path: Path) -> None:
    """A thread that still runs, an error, a text as the exit code, and an interrupt."""
    path = script(
        tmp_path,
        """
        import os, sys, threading, time
        def late():
            time.sleep(0.2)
            print("late")
        threading.Thread(target=late).start()
        how = os.environ["HOW"]
        if how == "error":
            raise ValueError("in vain")
        if how == "interrupt":
            raise KeyboardInterrupt
        sys.exit({"text": "a word", "large": 300, "none": None}[how])
        """,
    )
    for how in ("error", "interrupt", "text", "large", "none"):
        fresh, forked = (
            run_ranks(path, 1, timeout_s=60, launcher=launcher, env={"HOW": how})
            for launcher in ("fresh", "direct")
        )
        assert forked.returncode == fresh.returncode, how
        assert forked.stdout == fresh.stdout == "late\n", how
        assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:], how


def test_a_failing_rank_gives_its_code_and_ends_the_others(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(85)
        time.sleep(2)
        """,
    )
    result = run_ranks(path, 2, timeout_s=30, launcher="direct")
    assert result.returncode == 85
    with pytest.raises(AssertionError, match="left with 85"):
        result.check()


@pytest.mark.parametrize("ignores_term", [True, False])
def test_hung_ranks_show_all_stacks_and_leave_no_process(
    tmp_path: Path, ignores_term: bool
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    path = script(
        tmp_path,
        f"""
        import os, signal, subprocess, sys, time
        if {ignores_term}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # A grandchild in a session of its own, as a worker of a torchrun agent is.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                 start_new_session=True)
        for pid in (os.getpid(), child.pid):
            open(os.path.join({str(pids)!r}, str(pid)), "w").close()

        def waits_for_ever_0():
            time.sleep(600)

        def waits_for_ever_1():
            time.sleep(600)

        globals()["waits_for_ever_" + os.environ["RANK"]]()
        """,
    )
    with pytest.raises(RanksHung) as hung:
        run_ranks(path, 2, timeout_s=1.5, launcher="direct")
    message = str(hung.value)
    for rank in (0, 1):
        assert f"stacks of rank{rank}." in message
        assert f"in waits_for_ever_{rank}" in message
    started = [int(file.name) for file in pids.iterdir()]
    assert len(started) == 4
    assert not [pid for pid in started if _alive(pid)]


def test_ranks_end_when_the_test_process_is_killed(tmp_path: Path) -> None:
    path = script(tmp_path, "import time; time.sleep(600)")
    mark_file = tmp_path / "mark"
    driver = tmp_path / "driver.py"
    driver.write_text(
        textwrap.dedent(
            f"""
            import uuid
            from tests.helpers.launch import run_ranks

            class Fixed:
                hex = uuid.uuid4().hex

            open({str(mark_file)!r}, "w").write(Fixed.hex)
            uuid.uuid4 = lambda: Fixed
            run_ranks({str(path)!r}, 2, timeout_s=600, launcher="fresh")
            """
        )
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    del env[processes.SESSION]
    process = subprocess.Popen([sys.executable, str(driver)], env=env)
    try:
        assert processes.wait_until(lambda: mark_file.exists() and mark_file.read_text() != "", 15)
        mark = mark_file.read_text()
        assert processes.wait_until(lambda: len(processes.marked(mark)) == 2, 15)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert processes.wait_until(lambda: processes.marked(mark) == [], 15)


def test_a_mark_finds_its_own_processes_only() -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours, other = (
        subprocess.Popen(sleep, env={**os.environ, processes.MARK: mark})
        for mark in (f"a{os.getpid()}", f"b{os.getpid()}")
    )
    try:
        assert processes.wait_until(lambda: processes.marked(f"a{os.getpid()}") == [ours.pid], 15)
        assert processes.end_marked(f"a{os.getpid()}") == []
        assert ours.wait(5) == -signal.SIGKILL and other.poll() is None
    finally:
        for process in (ours, other):
            process.kill()
            process.wait()


def test_ranks_under_torchrun_find_each_other(tmp_path: Path) -> None:
    result = run_ranks(script(tmp_path, PROGRAM), 2, timeout_s=120, launcher="torchrun").check()
    assert result.stdout.count("sum 2") == 2


@pytest.mark.nightly
def test_a_hung_collective_shows_who_stays_away(tmp_path: Path) -> None:
    # On a busy machine two ranks may not have reached the collective in 20 seconds.
    for timeout_s in (20, 100):
        with pytest.raises(RanksHung) as hung:
            program = script(tmp_path, PROGRAM)
            run_ranks(program, 2, timeout_s=timeout_s, env={"HANG": "1"}, launcher="torchrun")
        message = str(hung.value)
        if message.count("sum 2") == 2 and "in all_reduce" in message:
            break
    assert message.count("sum 2") == 2
    assert "in stays_away" in message.split("stacks of rank1")[1]
    assert "in all_reduce" in message.split("stacks of rank0")[1].split("--- stacks")[0]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
