"""One parser for what comes from outside: each text is a value or a ValueError."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from megatron.trainer.checkpoint.files import CORE_MARK, complete_iterations
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import MAX_NESTING, parse_json, parse_yaml
from megatron.trainer.data import tokenizer
from megatron.trainer.logging.metrics import next_number
from tests.helpers import spoil


def nested(depth: int, left: str = "[", right: str = "]") -> str:
    return left * depth + right * depth


@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":[', "]}")])
def test_json_is_nested_so_deep_and_no_deeper(left: str, right: str) -> None:
    most = MAX_NESTING // (len(left) if left == "[" else 2)
    for depth in (1, most - 1, most):
        for text in (nested(depth, left, right), nested(depth, left, right).encode()):
            assert parse_json(text) is not None
    for depth in (most + 1, 300, 900, 20_000):
        with pytest.raises(ValueError, match="too deeply"):
            parse_json(nested(depth, left, right))
    wide = "[" + "[]," * 50_000 + "[]]"
    assert len(parse_json(wide)) == 50_001, "many brackets, but not inside one another"


def test_what_is_parsed_can_be_copied_shown_and_stored() -> None:
    value = parse_json(nested(MAX_NESTING))
    assert parse_json(json.dumps(value)) == value and str(value)


def test_json_of_finite_numbers_has_no_others() -> None:
    assert math.isnan(parse_json("NaN")) and parse_json("1e999") == math.inf
    for text in ("NaN", "[-Infinity]", "1e999", '{"a": -1e400}'):
        with pytest.raises(ValueError, match="is in it"):
            parse_json(text, finite=True)
    assert parse_json("[1, 2.5]", finite=True) == [1, 2.5]


def test_each_text_is_a_value_or_a_value_error() -> None:
    rng = random.Random(0)
    for _ in range(500):
        data = spoil.spoiled_json(rng, {"a": [1, {"b": "c"}], "d": 2.5})
        text = spoil.spoiled_text(rng, "a: [1, b]\nc: {d: e}\n")
        for parse in (
            lambda data=data: parse_json(data),
            lambda text=text: parse_yaml(text),
        ):
            assert spoil.problem_of(parse, ValueError) is None, (data[:200], text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000,
        "a: " * 3000,
        "- " * 3000,
        "!!int x",
        "!!timestamp x",
        "!!bool 3",
        "2001-99-99",
        "9" * 5000,
        "a: &a [1]\nb: *a",
        "a: 1\nb: 2\na: 1",
        "a: [{b: 1, b: 2}]",
        "!!python/object/apply:os.system [id]",
        "\x00",
        "x" * (1 << 21),
    ],
    ids=lambda text: text[:12].strip(),
)
def test_hostile_yaml_is_one_line(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_yaml(text)
    assert "\n" not in str(caught.value)


def test_digits_that_are_no_number_are_no_iteration_and_no_launch(tmp_path: Path) -> None:
    for name in ("iter_\u00b2", "iter_0000004", "iter_\u0663"):
        (tmp_path / name).mkdir()
        (tmp_path / name / CORE_MARK).write_text("{}")
    assert complete_iterations(tmp_path) == [4]
    names = ["7.0.3", "7.0.\u00b2", "7.0." + "9" * 5000, "7.0.\u0663", "8.0.9"]
    assert next_number("7.0.", names) == 4


def test_a_library_that_panics_is_one_line(tmp_path: Path) -> None:
    class Panic(BaseException):
        """As pyo3's, which is no Exception."""

    def panic() -> None:
        raise Panic("range end index 9 out of range")

    with pytest.raises(UsageError, match="cannot be read as a tokenizer"):
        tokenizer._load(panic, tmp_path, "--tokenizer-model")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenizer._load(interrupted, tmp_path, "--tokenizer-model")
