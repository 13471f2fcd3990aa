"""Ten thousand wrong inputs, most of them of the kinds that are quickly read.

COPUS_BAD_INPUTS asks for more.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.helpers import spoil
from tests.helpers.bad_inputs import FEW_OF_EXTRAS, KINDS, spoil_and_read

TOTAL = int(os.environ.get("COPUS_BAD_INPUTS", "10000"))
FEW = {"flags": 12, "plan": 12, "texts": 12}
FEW |= {"journal": 40, "pickled": 40, "profile": 40, "settings": 100, "tracker": 100, "lock": 100}
"""Of ten thousand, for the readers that take milliseconds or more."""
FEW |= FEW_OF_EXTRAS


def number_of(kind: str) -> int:
    """How many wrong inputs a reader gets."""
    if kind in FEW:
        return -(-FEW[kind] * TOTAL // 10_000)
    return -(-(10_000 - sum(FEW.values())) * TOTAL // (10_000 * (len(KINDS) - len(FEW))))


def test_there_are_as_many_as_were_asked_for() -> None:
    assert FEW.keys() < KINDS.keys() and sum(map(number_of, KINDS)) >= TOTAL


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_input_gets_an_answer_or_one_line(kind: str, tmp_path: Path) -> None:
    found = {i: spoil_and_read(kind, 0, i, tmp_path) for i in range(number_of(kind))}
    assert not {i: problem for i, problem in found.items() if problem}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_spoiled_was_right(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spoil, "spoil_file", lambda rng, path: None)
    for name in ("spoiled_bytes", "spoiled_text", "spoiled_flags"):
        monkeypatch.setattr(spoil, name, lambda rng, whole, *more: whole)
    monkeypatch.setattr(spoil, "spoiled_json", lambda rng, value: json.dumps(value).encode())
    problem_of, tool_problem = spoil.problem_of, spoil.tool_problem
    monkeypatch.setattr(spoil, "problem_of", lambda act, *allowed: problem_of(act))
    monkeypatch.setattr(spoil, "tool_problem", lambda result, *codes: tool_problem(result))
    assert spoil_and_read(kind, 0, 0, tmp_path) is None
