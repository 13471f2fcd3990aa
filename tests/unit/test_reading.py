"""Files of a run that somebody else has put there, and one reading of them by screen and report."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from copus_ext.journal import NAME as JOURNAL
from copus_ext.reconfigure.checked import read_value
from copus_ext.report.lines import Lines
from copus_ext.report.now import read_now
from copus_ext.report.page import Book, script_json
from copus_ext.tail import Tail, last_lines
from megatron.training.metrics import METRICS_FILE
from tests.helpers.written_runs import usual_run
from tools import report, status


def link(path: Path) -> None:
    usual_run(path.parent / "elsewhere", steps=20)
    path.symlink_to(path.parent / "elsewhere" / METRICS_FILE)


@pytest.mark.parametrize("make", [link, os.mkfifo, Path.mkdir], ids=["link", "pipe", "folder"])
def test_what_is_no_plain_file_is_not_read(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    make(path)
    assert list(Tail(path).records()) == list(last_lines(path, 1000)) == []
    lines = Lines(path)
    with pytest.raises(OSError):
        list(lines.new())
    assert lines.at(0) == {}
    with pytest.raises(ValueError, match=METRICS_FILE):
        read_value(path, lambda value: value)


@pytest.mark.parametrize("name", [METRICS_FILE, JOURNAL])
@pytest.mark.parametrize("make", [link, os.mkfifo], ids=["link", "pipe"])
def test_the_commands_name_what_is_no_plain_file(
    make: Callable[[Path], None], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    usual_run(run, steps=20)
    (run / name).unlink()
    make(run / name)
    assert status.main([str(run)]) == 5
    assert report.main([str(run), "-o", str(tmp_path / "x.html")]) == 5
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(name in line for line in said), said


def test_a_journal_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    usual_run(tmp_path / "run", steps=20)
    (tmp_path / "kept.jsonl").symlink_to(tmp_path / "run" / JOURNAL)
    page = tmp_path / "x.html"
    assert report.main([str(tmp_path / "kept.jsonl"), "-o", str(page)]) == 0
    assert '"number":1' in page.read_text()


def others(value: Any, odd: Any) -> Iterator[Any]:
    """The value with one of its parts replaced, in turn; of a list the first entry."""
    yield odd
    if isinstance(value, dict) or (isinstance(value, list) and value):
        for key in value if isinstance(value, dict) else [0]:
            for part in others(value[key], odd):
                changed = copy.copy(value)
                changed[key] = part
                yield changed


ODD = [None, "x", math.nan, 10**400, -(10**400), [], {"a": [1]}, True]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd)[:6])
def test_a_decision_with_anything_in_it_is_shown(odd: Any, tmp_path: Path) -> None:
    usual_run(tmp_path, steps=20)
    path = tmp_path / JOURNAL
    kept, line = path.read_text().splitlines(keepends=True)[:2]
    record = json.loads(line)
    for part in record["situation"], record["decision"]:
        part |= {"rows": part["rows"][-2:]} if "rows" in part else {}
    record["situation"]["current"] = 0
    changed = list(others(record, odd))
    path.write_text(kept + "".join(json.dumps(one) + "\n" for one in changed))
    book = Book([tmp_path])
    book.refresh()
    assert len(changed) > 80 and script_json(book.payload())
    for one in changed[::4]:
        path.write_text(kept + json.dumps(one) + "\n")
        read_now(tmp_path)


def test_a_time_of_a_step_that_is_beyond_all_bounds_is_passed_over(tmp_path: Path) -> None:
    run = usual_run(tmp_path, steps=20)
    path = run.path / METRICS_FILE
    huge = f'"elapsed_per_iteration_ms":{10**400}'
    path.write_text(re.sub(r'"elapsed_per_iteration_ms":[0-9.]+', huge, path.read_text()))
    assert read_now(tmp_path).step_s is None
