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

MIN_ACCEPTED = 95
"""May grow, must not fall."""


@pytest.fixture(scope="module")
def judgements() -> dict[str, Any]:
    sets = compatibility.read_sets()
    return {name: compatibility.judge(flags) for name, flags in sets.items()}


def test_commands_are_accepted_and_none_crashes(judgements: dict[str, Any]) -> None:
    count = compatibility.counts(judgements)
    assert len(judgements) == 165 and count["crashed"] == 0
    assert count["accepted"] >= MIN_ACCEPTED


def test_every_refusal_names_a_way_on(judgements: dict[str, Any]) -> None:
    refused = [j for j in judgements.values() if j.outcome == "refused"]
    lines = [line for judgement in refused for line in judgement.lines]
    assert lines and not [line for line in lines if not names_a_way_on(line)]


def test_only_notes_say_what_an_accepted_command_goes_without(judgements: dict[str, Any]) -> None:
    accepted = [j for j in judgements.values() if j.outcome == "accepted"]
    assert all(len(set(j.lines)) == len(j.lines) <= 6 for j in accepted)


def test_the_page_is_what_the_script_makes(judgements: dict[str, Any]) -> None:
    page = compatibility.PAGE.read_text(encoding="utf-8")
    again = "run `PYTHONPATH=. python scripts/docs/megatron_flags.py` and commit the page"
    assert page == compatibility.page(judgements), again


def test_scaling_touches_sizes_lengths_and_places_only(
    judgements: dict[str, Any], tmp_path: Path
) -> None:
    """All that is accepted also fits on four CPU ranks, or as many as it has stages, but for 8
    bits, which need a GPU."""
    for name, argv in compatibility.read_sets().items():
        if judgements[name].outcome != "accepted":
            continue
        stages = grouped(argv).get("--pipeline-model-parallel-size", ["1"])
        ranks = max(4, int(stages[0]))
        small = scaled(name, argv, tmp_path, world_size=ranks)
        before, after = grouped(argv), grouped(small)
        changed = {f for f in before.keys() | after.keys() if before.get(f) != after.get(f)}
        assert changed <= SCALED, name
        if "--fp8-format" not in before:
            config = resolve(parse_args(small), ranks)
            assert config.model.num_layers <= 16 and config.model.hidden_size == 64, name
            continue
        with pytest.raises(UsageError) as error:
            resolve(parse_args(small), ranks)
        assert all(map(names_a_way_on, str(error.value).split("\n"))), name


def test_the_commands_say_where_they_are_from() -> None:
    stored = json.loads(compatibility.DATA.read_text(encoding="utf-8"))
    assert "core_v0.16.1" in stored["provenance"]


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
    page = compatibility.page(judgements)
    assert "| gpt | 2 | 1 | 1 |" in page and "| `gpt/bad` | refused | " in page
    assert "`gpt/good`" not in page
    assert (
        "did you mean `--num-layers`?" in page and "`--hybrid-context-parallel` | 1 | 0 |" in page
    )
    assert "`--dist-ckpt-strictness` | 1 |" in page
