"""Files that a user names for an answer: a pipe is written to, all else is replaced as a whole."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from copus_ext.commands.main import main
from megatron.trainer.common import output_file
from megatron.trainer.common.output_file import write_output
from tests.helpers.written_runs import usual_run


def through_pipe(pipe: Path, write: Callable[[], object]) -> bytes:
    """What is written into a pipe of this name; it holds 1 MB, so that no one has to read."""
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, 1 << 20)
        assert not write()
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
        return os.read(end, 1 << 20)
    finally:
        os.close(end)


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    run, pipe = usual_run(tmp_path / "run", steps=20).path, tmp_path / "pipe"
    data = through_pipe(pipe, lambda: main(["report", str(run), "-o", str(pipe)]))
    assert b"</html>" in data
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "run"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for text in ("first", "second \ud800"):
        write_output(tmp_path / "link", text)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "second ?"


def test_an_error_names_the_file_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("kept")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(output_file.os, "fsync", full)
    with pytest.raises(OSError) as caught:
        write_output(path, "new")
    assert caught.value.filename == str(path)
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_text() == "kept"


def test_a_run_whose_name_is_no_utf8_has_a_page(tmp_path: Path) -> None:
    run = usual_run(tmp_path / os.fsdecode(b"d\xe9"), steps=20).path
    assert main(["report", str(run), "-o", str(tmp_path / "n.html")]) == 0
    assert "d?" in (tmp_path / "n.html").read_text(encoding="utf-8")
    assert len(list(tmp_path.iterdir())) == 2
