"""What a launch on one node opens to others: nothing beyond the loopback."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from copus_ext.launch.listen import loopback_interface
from megatron.trainer.common.control import write_stop
from tests.helpers import processes
from tests.helpers.jobs import ENDLESS, TINY, steps_of
from tests.helpers.launch import ROOT
from tests.helpers.listeners import listening

pytestmark = [pytest.mark.waits, pytest.mark.timeout(600)]
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Launch:
    """A supervisor with two ranks, whose environment names no interface."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.folder, self.run, self.mark = folder, folder / "run", uuid.uuid4().hex
        env = {name: value for name, value in os.environ.items() if name not in _INTERFACES}
        env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", processes.MARK: self.mark}
        command = [sys.executable, "-m", "copus_ext.launch.supervisor", "--nproc-per-node", "2"]
        flags = [*TINY.split(), *ENDLESS, "--log-interval", "1", "--save", "run"]
        with (folder / "log").open("wb") as log:
            self.child = subprocess.Popen(
                [*command, *words, "--", *flags],
                cwd=folder,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def last_step(self) -> int:
        try:
            return max((s["iteration"] for s in steps_of(self.run)), default=0)
        except FileNotFoundError:
            return 0

    def wait_for_step(self, step: int) -> None:
        deadline_s = time.monotonic() + 300
        while self.last_step() < step:
            assert time.monotonic() < deadline_s and self.child.poll() is None, self.log[-4000:]
            time.sleep(0.1)

    def check_listeners(self) -> set[int]:
        """The ports on which processes of the launch listen, all on the loopback."""
        found = listening(*processes.marked(self.mark))
        beyond = {one for one in found if not ipaddress.ip_address(one[0]).is_loopback}
        assert found and not beyond
        return {port for _, port in found}

    def interfaces(self) -> list[dict[str, str]]:
        """What the ranks were told of interfaces."""
        told = []
        for pid in processes.marked(self.mark):
            pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            if "LOCAL_RANK" in env:
                told.append({name: env[name] for name in _INTERFACES})
        return told

    def stop(self) -> int:
        write_stop(self.run, "test")
        return self.child.wait(timeout=200)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def make(*words: str) -> Launch:
        launches.append(Launch(tmp_path, words))
        return launches[-1]

    yield make
    for one in launches:
        processes.end_marked(one.mark)
        one.child.wait()


def test_a_plain_launch_listens_on_the_loopback_alone(begin: Callable[..., Launch]) -> None:
    launch = begin()
    launch.wait_for_step(2)
    launch.check_listeners()
    own = dict.fromkeys(_INTERFACES, loopback_interface())
    assert launch.interfaces()[:2] == [own, own]
    assert launch.stop() == 85, launch.log[-4000:]
