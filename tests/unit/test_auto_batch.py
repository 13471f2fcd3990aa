"""`--global-batch-size auto`: what it takes, what it keeps, and what it refuses."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from copus_ext.commands.pretrain import resolve_run
from copus_ext.controller.auto_batch import with_batch
from copus_ext.controller.flags import CopusConfig, controller_flags
from megatron.trainer.common.errors import UsageError
from megatron.trainer.config.arguments import parse_args, resolve
from tests.helpers.examples import names_a_way_on
from tests.helpers.jobs import TINY

AUTO = TINY.replace("--global-batch-size 8", "--global-batch-size auto")
LONG = "--copus --train-samples 100000"


def parsed(more: str) -> Any:
    return parse_args([*AUTO.split(), *more.split()], {"copus controller": CopusConfig})


def found(more: str, *, world: int = 2, stored: dict[str, Any] | None = None) -> tuple[int, str]:
    args = parsed(more)
    resolved = functools.partial(resolve_run, world_size=world)
    known, why = with_batch(args, controller_flags(args), world, resolved=resolved, stored=stored)
    assert resolved(known).batch.initial_global_batch_size == known.global_batch_size
    return known.global_batch_size, why


@pytest.mark.parametrize(
    ("more", "world", "unit"),
    [
        ("", 2, 2),
        ("--micro-batch-size 3", 2, 6),
        ("--pipeline-model-parallel-size 2", 6, 3),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 4, 4),
        ("--tensor-model-parallel-size 2 --micro-batch-size 2", 4, 4),
    ],
)
def test_it_is_a_unit_of_the_layout_times_a_power_of_two(more: str, world: int, unit: int) -> None:
    batch, why = found(f"{LONG} {more}", world=world)
    times = batch // unit
    assert batch == unit * times and times & (times - 1) == 0
    assert f"a first batch of {batch:,} " in why and why.endswith("--lr is that of this batch")


def test_a_slow_link_asks_for_a_larger_one(tmp_path: Any) -> None:
    """The batch follows from the machine and from the length of the run."""
    slow = f"{LONG} --copus-cluster {tmp_path}/slow.json"
    gpu = '{"gpu": "CPU", "num_nodes": 2, "gpus_per_node": 1, '
    machine = gpu + '"intra_bytes_per_s": 1e9, "nic_bytes_per_s": 1e6}'
    (tmp_path / "slow.json").write_text(machine)
    assert found(slow)[0] > found(LONG)[0] >= found("--copus --train-samples 2000")[0]


def test_bounds_of_the_batch_hold() -> None:
    free = found(LONG)[0]
    assert found(f"{LONG} --copus-max-global-batch-size {free // 2}")[0] == free // 2
    assert found(f"{LONG} --copus-min-global-batch-size {2 * free}")[0] == 2 * free


def test_a_reference_batch_is_told_with_the_rate(tmp_path: Any) -> None:
    settings = tmp_path / "copus.yaml"
    settings.write_text("reference_batch_size: 24\n")
    assert found(f"{LONG} --copus-config {settings}")[1].endswith("--lr is that of the batch 24")


@pytest.mark.parametrize(
    "stored",
    [{"initial_global_batch_size": 48, "global_batch_size": 24}, {"global_batch_size": 48}],
)
def test_a_run_keeps_the_batch_of_its_first_launch(stored: dict[str, Any]) -> None:
    batch, why = found(f"{LONG} --train-samples 999", stored=stored)
    assert batch == 48 and why.endswith("is 48, as at the first launch of the run")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--train-samples 100", "needs --copus"),
        ("--copus --train-iters 100", "depend on the batch; give --train-samples"),
        (f"{LONG} --rampup-batch-size 2 2 64", "does not go with --rampup-batch-size"),
        (f"{LONG} --step-batch-size-schedule 0:8", "does not go with --step-batch-size-schedule"),
        (f"{LONG} --copus-min-global-batch-size 5 --copus-max-global-batch-size 7", "5 to 7"),
        (f"{LONG} --hidden-size 65536 --copus-cluster h100-80g:2", "does not fit into memory"),
    ],
)
def test_a_refusal_is_one_line_with_a_way_on(more: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        found(more)
    text = str(error.value)
    assert words in text and "\n" not in text and names_a_way_on(text), text


def test_a_checkpoint_without_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="does not say its batch; give a number"):
        found(LONG, stored={})


def test_the_trainer_alone_has_no_planner() -> None:
    with pytest.raises(UsageError, match="where a run with --copus begins") as error:
        resolve(parsed("--train-samples 100"), 2)
    assert names_a_way_on(str(error.value))
    with pytest.raises(UsageError, match=re.escape("'automatic' is not a whole number")):
        parse_args(["--global-batch-size", "automatic"])
