"""A run in Megatron-LM's own program that is killed goes on with the same samples."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron.trainer.logging.metrics import read_metrics
from tests.guest.program import HAS_PROGRAM, SPLIT, launch, steps, train

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HAS_PROGRAM, reason="PYTHONPATH lacks Megatron-LM's own program"),
]
CHANGES = {4: "tp1.pp2.dp1:16:1", 8: "tp1.pp1.dp2:8:2", 12: "tp2.pp1.dp1:8:1"}
# Where rank 1 is killed, launch by launch; the last one ends by itself.
KILLS = (
    {2: "!!:8:1"},
    {4: "tp1.pp2.dp1!!copy:16:1"},
    {7: "!!:16:1"},
    {8: "tp1.pp1.dp2!!verify:8:2"},
    {11: "!!:8:2"},
    {},
)
STARTS = (0, 0, 3, 6, 6, 9)
FLAGS = f"""--tensor-model-parallel-size 2 --train-iters 20 --save-interval 3 --copus
--copus-layouts all --dist-ckpt-optim-fully-reshardable {SPLIT}"""


STAYS = "--train-iters 8 --copus --copus-layouts all"


def listed(kill: dict[int, str]) -> str:
    rows = CHANGES | kill
    return "moving=" + ",".join(f"{step}:{rows[step]}" for step in sorted(rows))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("kills")
    found: dict[str, Any] = {"folder": folder}
    found["whole"] = steps(train(folder, "whole", listed({}), FLAGS, ranks=2).stdout)
    found["launches"] = []
    for kill in KILLS:
        flags = f"{FLAGS} --load {folder / 'killed'}"
        found["launches"].append(launch(folder, "killed", listed(kill), flags, ranks=2))
    # Here the layout of the flags can cut the batch in smaller micro-batches alone.
    flags = f"{STAYS} --load {folder / 'broken'}"
    first = launch(
        folder, "broken", "moving=3:tp2.pp1.dp1:8:8", f"{flags} --exit-interval 5", ranks=2
    )
    found["before"] = steps(first.check().stdout)
    found["broken"] = launch(folder, "broken", "moving=0:!copy:8:8", flags, ranks=2).check().stdout
    return found


def test_every_launch_but_the_last_one_is_killed(runs: dict[str, Any]) -> None:
    codes = [run.codes[1] for run in runs["launches"]]
    assert codes == [-signal.SIGKILL] * (len(KILLS) - 1) + [0]


def test_it_goes_on_from_the_last_save_with_its_samples_and_losses(runs: dict[str, Any]) -> None:
    whole = {row[0]: row for row in runs["whole"]}
    assert len(whole) == 16 and runs["whole"][-1][1] == 160
    for start, run in zip(STARTS, runs["launches"], strict=True):
        rows = steps(run.stdout)
        assert [row[0] for row in rows] == [start + i + 1 for i in range(len(rows))]
        for i, row in enumerate(rows):
            expected = whole[row[0]]
            assert row[:4] == expected[:4]
            # That loop prints the mean of two losses at the second step of a launch.
            if i != 1 or not start:
                assert row[4] == pytest.approx(expected[4], rel=1e-5)
    assert rows[-1][0] == 16


def test_a_start_goes_back_to_the_layout_that_the_run_had(runs: dict[str, Any]) -> None:
    was = {3: "tp2.pp1.dp1", 6: "tp1.pp2.dp1", 9: "tp1.pp1.dp2"}
    for start, run in zip(STARTS, runs["launches"], strict=True):
        told = [line for line in run.stdout.splitlines() if "when it was saved" in line]
        if was.get(start) in (None, "tp2.pp1.dp1"):
            assert told == []
        else:
            reason = f"the run was on {was[start]} when it was saved"
            assert told == [f"copus: layout tp2.pp1.dp1 -> {was[start]}: {reason}"]


def test_another_layout_of_the_flags_is_followed(runs: dict[str, Any]) -> None:
    """The flags of the run asked for tp2, where it ended, too."""
    flags = FLAGS.replace("tensor-model-parallel", "pipeline-model-parallel")
    flags = f"{flags} --load {runs['folder'] / 'killed'}"
    output = launch(runs["folder"], "other", listed({}), flags, ranks=2).check().stdout
    line = "copus: the run was on tp2.pp1.dp1; it starts on tp1.pp2.dp1, as the flags say"
    assert [x for x in output.splitlines() if "the run was on" in x] == [line]


def test_a_change_at_the_start_that_fails_leaves_the_layout_of_the_flags(
    runs: dict[str, Any],
) -> None:
    told = [x for x in runs["broken"].splitlines() if x.startswith("copus: ")]
    assert told[:3] == [
        "copus: layout tp1.pp1.dp2 -> tp2.pp1.dp1: the run was on tp2.pp1.dp1 when it was saved",
        "copus: the layout stays tp1.pp1.dp2: copy: rank 1: RuntimeError: broken on purpose",
        "copus: batch 8 in micro-batches of 4 in place of 8 in micro-batches of 8, which "
        "tp1.pp1.dp2 cannot cut",
    ]
    rows = runs["before"] + steps(runs["broken"])
    assert [row[:2] for row in rows] == [(i + 1, 8 * (i + 1)) for i in range(8)]
    kinds = [(r["kind"], r.get("outcome", {}).get("kind")) for r in _journal(runs)]
    assert kinds.count(("relayout", "moved")) == kinds.count(("relayout", "rolled_back")) == 1


def _journal(runs: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (runs["folder"] / "broken" / "journal.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_record_counts_every_step_once(runs: dict[str, Any]) -> None:
    run: Path = runs["folder"] / "killed"
    rows = [r for r in read_metrics(run) if r["kind"] == "step"]
    last = {row["iteration"]: row["consumed_samples"] for row in rows}
    assert last == {row[0]: row[1] for row in runs["whole"]}
