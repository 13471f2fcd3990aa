"""Temporary folders of launches go with their process, and never without it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from copus_ext.launch.scratch import launch_folder, remove_abandoned

HOLDER = """
import sys, time
from pathlib import Path
from copus_ext.launch.scratch import launch_folder
with launch_folder() as folder:
    Path(folder, "report.json").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder."""
    env = {**os.environ, "TMPDIR": str(temporary)}
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=env, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    yield child, Path(child.stdout.readline().strip())
    child.kill()
    child.wait()


def test_a_folder_goes_with_its_block(temporary: Path) -> None:
    with launch_folder() as folder:
        assert Path(folder).parent == temporary and list(temporary.iterdir()) == [Path(folder)]
    assert not list(temporary.iterdir())


def test_the_folder_of_a_killed_process_goes_and_all_others_stay(
    temporary: Path,
    holder: tuple[subprocess.Popen[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    child, folder = holder
    of_machine, pid, start = folder.name.split("-")[1:4]
    other = "0" * 8 if of_machine != "0" * 8 else "1" * 8
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine").touch()
    stay = [
        temporary / "copus-abc",
        temporary / "copus-cache",
        temporary / f"copus-{other}-{pid}-1-of_another_machine",
        temporary / f"x-copus-{of_machine}-{pid}-1-named_otherwise",
    ]
    for path in stay:
        path.mkdir()
    link = temporary / f"copus-{of_machine}-{pid}-1-link"
    link.symlink_to(elsewhere)
    number_taken = temporary / f"copus-{of_machine}-{os.getpid()}-{start}1-abc"
    number_taken.mkdir()
    remove_abandoned()
    assert (folder / "report.json").exists(), "its process lives"
    assert not number_taken.exists(), "the number is now that of another process"
    child.kill()
    child.wait()
    assert folder.exists()
    with launch_folder() as own:
        assert not folder.exists() and Path(own).exists()
    assert all(path.exists() for path in [*stay, link, elsewhere / "mine"])
