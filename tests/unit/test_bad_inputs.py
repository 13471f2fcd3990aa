"""Wrong inputs, a few of each kind; bench/faults/inputs.py reads thousands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import bad_inputs
from tests.helpers.bad_inputs import KINDS, spoil_and_read

FEW = 12


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_input_gets_an_answer_or_one_line(kind: str, tmp_path: Path) -> None:
    found = {i: spoil_and_read(kind, 0, i, tmp_path) for i in range(FEW)}
    assert not {i: problem for i, problem in found.items() if problem}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_spoiled_was_right(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_inputs, "spoil_file", lambda rng, path: None)
    monkeypatch.setattr(bad_inputs, "spoiled_bytes", lambda rng, data: data)
    monkeypatch.setattr(bad_inputs, "spoiled_json", lambda rng, value: json.dumps(value).encode())
    monkeypatch.setattr(bad_inputs, "spoiled_flags", lambda rng, flags, known: flags)
    problem_of, tool_problem = bad_inputs.problem_of, bad_inputs.tool_problem
    monkeypatch.setattr(bad_inputs, "problem_of", lambda act, *allowed: problem_of(act))
    monkeypatch.setattr(bad_inputs, "tool_problem", lambda result, *codes: tool_problem(result))
    assert spoil_and_read(kind, 0, 0, tmp_path) is None
