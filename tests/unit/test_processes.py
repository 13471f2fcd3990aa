"""What a test starts ends with the process that runs the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import processes
from tests.helpers.launch import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

DRIVER = """
import subprocess, sys, time
from tests.helpers.processes import guard_session

guard_session()
again = "import subprocess, sys, time\\nwhile True: subprocess.run(['sleep', '600'])"
subprocess.Popen([sys.executable, "-c", again], start_new_session=True)
print(flush=True)
time.sleep(600)
"""
"""Starts a process in a session of its own, which starts another as often as that ends."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_it_ends_even_when_that_is_killed(number: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), processes.MARK: f"guarded{os.getpid()}"}
    del env[processes.SESSION]
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], env=env, stdout=subprocess.PIPE)
    try:
        assert driver.stdout is not None and driver.stdout.readline()
        # The guard, the process, and what it starts.
        assert processes.wait_until(lambda: len(processes.marked(env[processes.MARK])) == 4, 20)
        driver.send_signal(number)
        assert processes.wait_until(lambda: processes.marked(env[processes.MARK]) == [], 20)
    finally:
        driver.kill()
        driver.communicate()
        processes.end_marked(env[processes.MARK])


def test_this_session_is_guarded() -> None:
    session = os.environ[processes.SESSION]
    with subprocess.Popen(["sleep", "600"], env=os.environ) as child:
        try:
            assert processes.wait_until(
                lambda: child.pid in processes.marked(session, name=processes.SESSION), 20
            )
        finally:
            child.kill()
    assert any(session.encode() in words for words in _command_lines())


def _command_lines() -> Iterator[list[bytes]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # It may have ended since.
        with contextlib.suppress(OSError):
            yield path.read_bytes().split(b"\0")
