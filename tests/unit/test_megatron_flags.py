"""Megatron-LM's own commands: how many are accepted, what the others are told, the page of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from scripts.docs import megatron_flags as compatibility
from tests.helpers.examples import names_a_way_on
from tests.helpers.scaled_commands import SCALED, grouped, scaled

MIN_ACCEPTED = {compatibility.DATA: 194, compatibility.OLDER_DATA: 153}
"""May grow, must not fall."""
TOTAL = {compatibility.DATA: 230, compatibility.OLDER_DATA: 165}


@pytest.fixture(scope="module")
def judgements() -> dict[str, Any]:
    return compatibility.judge_all(compatibility.DATA)


@pytest.fixture(scope="module")
def older() -> dict[str, Any]:
    """Those of core_v0.16.1."""
    return compatibility.judge_all(compatibility.OLDER_DATA)


def test_commands_are_accepted_and_none_crashes(
    judgements: dict[str, Any], older: dict[str, Any]
) -> None:
    for data, found in ((compatibility.DATA, judgements), (compatibility.OLDER_DATA, older)):
        count = compatibility.counts(found)
        assert len(found) == TOTAL[data] and count["crashed"] == 0
        assert count["accepted"] >= MIN_ACCEPTED[data] >= 0.75 * TOTAL[data]


def test_every_refusal_names_a_way_on(judgements: dict[str, Any], older: dict[str, Any]) -> None:
    both = [*judgements.values(), *older.values()]
    refused = [j for j in both if j.outcome == "refused"]
    lines = [line for judgement in refused for line in judgement.lines]
    assert lines and not [line for line in lines if not names_a_way_on(line)]


def test_only_notes_say_what_an_accepted_command_goes_without(judgements: dict[str, Any]) -> None:
    accepted = [j for j in judgements.values() if j.outcome == "accepted"]
    assert all(len(set(j.lines)) == len(j.lines) <= 6 for j in accepted)


def test_the_page_is_what_the_script_makes(
    judgements: dict[str, Any], older: dict[str, Any]
) -> None:
    page = compatibility.PAGE.read_text(encoding="utf-8")
    apart = compatibility.read_apart()
    again = "run `PYTHONPATH=. python scripts/docs/megatron_flags.py` and commit the page"
    assert page == compatibility.page(judgements, older, apart), again


def test_scaling_touches_sizes_lengths_and_places_only(
    judgements: dict[str, Any], older: dict[str, Any], tmp_path: Path
) -> None:
    """All that is accepted also fits on four CPU ranks, or as many as it has stages, but for 8
    bits, which need a GPU."""
    accepted = [
        (name, argv)
        for data, found in ((compatibility.DATA, judgements), (compatibility.OLDER_DATA, older))
        for name, argv in compatibility.read_sets(data).items()
        if found[name].outcome == "accepted"
    ]
    for name, argv in accepted:
        stages = grouped(argv).get("--pipeline-model-parallel-size", ["1"])
        ranks = max(4, int(stages[0]))
        small = scaled(name, argv, tmp_path, world_size=ranks)
        before, after = grouped(argv), grouped(small)
        changed = {f for f in before.keys() | after.keys() if before.get(f) != after.get(f)}
        assert changed <= SCALED, name
        if "--fp8-format" not in before:
            config = resolve(parse_args(small), ranks)
            assert config.model.num_layers <= 32 and config.model.hidden_size == 64, name
            continue
        with pytest.raises(UsageError) as error:
            resolve(parse_args(small), ranks)
        assert all(map(names_a_way_on, str(error.value).split("\n"))), name


def test_the_commands_say_where_they_are_from() -> None:
    for data, version in ((compatibility.DATA, "0.20.0"), (compatibility.OLDER_DATA, "0.16.1")):
        assert version in json.loads(data.read_text(encoding="utf-8"))["provenance"]


def test_what_is_refused_is_counted_with_its_reason() -> None:
    """The page of two commands, one of them wrong in two ways."""
    base = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-3"
    more = "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 2 --mock-data"
    good = f"{base} {more} --train-iters 5 --dist-ckpt-strictness log_all".split()
    judgements = {
        "gpt/good": compatibility.judge(good),
        "gpt/bad": compatibility.judge([*good, "--hybrid-context-parallel", "--num_layer", "1"]),
    }
    assert [j.outcome for j in judgements.values()] == ["accepted", "refused"]
    page = compatibility.page(judgements, {}, {"inference": 3, "BERT": 4})
    assert "something else: inference (3), BERT (4)." in page and "are 7 commands" in page
    assert "| gpt | 2 | 1 | 1 |" in page and "| `gpt/bad` | refused | " in page
    assert "`gpt/good`" not in page
    assert (
        "did you mean `--num-layers`?" in page and "`--hybrid-context-parallel` | 1 | 0 |" in page
    )
    assert "`--dist-ckpt-strictness` | 1 |" in page
