"""What another user, or a slip, put in the place of a file of a run holds nobody up."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from copus_ext.controller import out_of_memory
from copus_ext.controller.decision_log import DecisionLog, read_journal
from copus_ext.planner.profile import read_profile
from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.safe_index import METADATA, read_common, read_index
from megatron.trainer.common.errors import Refused
from megatron.trainer.common.plain_file import append_plain, open_plain
from megatron.trainer.logging.metrics import previous_launches, read_metrics
from megatron.trainer.resilience.lock import _read
from tests.helpers.checkpoints import make_checkpoint

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


def at(name: str, read: Callable[[Path], Any]) -> Any:
    return pytest.param(name, read, id=f"{name}-{getattr(read, '__name__', 'read')}")


READERS = [
    at(files.TRACKER, lambda path: files.read_latest(path.parent)),
    at(files.MANIFEST, lambda path: files.read_manifest(path.parent)),
    at("x_0_0.distcp", files.checksum),
    at(METADATA, read_index),
    at(files.COMMON, lambda path: files._torn(path)),
    at("metrics.jsonl", read_metrics),
    at("metrics.jsonl", lambda path: previous_launches(path.parent)),
    at("journal.jsonl", lambda path: list(read_journal(path))),
    at("journal.jsonl", lambda path: DecisionLog(path.parent).write("start")),
    at("lock", _read),
    at("profile.jsonl", read_profile),
]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_reader_waits_for_no_pipe(
    tmp_path: Path, name: str, read: Callable[[Path], Any], make: Callable[[Path], Any]
) -> None:
    make(tmp_path / name)
    with pytest.raises((OSError, ValueError), match=re.escape(str(tmp_path / name))):
        read(tmp_path / name)


def test_a_pipe_in_place_of_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / out_of_memory.FILE).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / out_of_memory.FILE)
    assert out_of_memory.remembered(tmp_path) == []


def test_a_checkpoint_with_a_pipe_among_its_files_is_refused(tmp_path: Path) -> None:
    """Also where no manifest lists its files."""
    root = make_checkpoint(tmp_path / "a")
    folder = files.folder_of(root, files.complete_iterations(root)[-1])
    (folder / files.MANIFEST).unlink(missing_ok=True)
    index = read_index(folder / METADATA)
    (data, *_) = sorted({where.relative_path for where in index.storage_data.values()})
    (folder / data).unlink()
    os.mkfifo(folder / data)
    with pytest.raises(Refused, match="is not a plain file"):
        read_index(folder / METADATA)
    (folder / files.COMMON).unlink(missing_ok=True)
    os.mkfifo(folder / files.COMMON)
    with pytest.raises(Refused, match="it is not a plain file"):
        read_common(folder)


def test_a_link_is_followed_where_one_may_be(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x")
    link = tmp_path / "link"
    link.symlink_to("there")
    with open_plain(link, follow=True) as file:
        assert file.read() == b"x"
    with append_plain(link) as file:
        file.write(b"y")
    assert (tmp_path / "there").read_bytes() == b"xy"
    with pytest.raises(OSError, match="it is a link"):
        open_plain(link)
