"""The shipped batch scripts as they are, on a real SLURM of pretend nodes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from megatron.trainer.checkpoint import files
from megatron.trainer.logging.metrics import read_metrics
from tests.distributed.worker_controller_layouts import write_profile
from tests.helpers.jobs import TINY, losses_of, steps_of
from tests.helpers.launch import ROOT
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(600)

BATCH, STEPS, FEWER = 8, 100, 40
BASE = [*TINY.split(), "--use-distributed-optimizer", "--lr-decay-style", "constant"]
BASE += ["--lr-warmup-samples", str(BATCH)]
RELAUNCH = """--copus --copus-layouts all --copus-relayout relaunch --copus-policy static"""
SETTINGS = "relayout_cost_s: 0.1\nmax_micro_batch_size: 1\n"
FLAGS = [*BASE, "--train-samples", str(BATCH * STEPS)]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the uninterrupted run of two ranks, started by srun alone."""
    run = tmp_path_factory.mktemp("whole")
    program = [sys.executable, ROOT / "pretrain_gpt.py", *FLAGS, "--run-dir", run]
    cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *program, timeout_s=200)
    (start,) = (r for r in read_metrics(run) if r["kind"] == "run.start")
    assert start["layout"] == "tp1.pp1.dp2"
    environment = start["rank_environment"]
    assert (environment["WORLD_SIZE"], environment["MASTER_ADDR"]) == ("2", "127.0.0.1")
    assert len(losses_of(run)) == STEPS
    return losses_of(run)


def test_signal_node_loss_and_preemption_change_nothing(
    cluster: Cluster, whole: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ["--nodes=2-3", "--partition=low", "--time=60"]
    flags = [*FLAGS, "--save-interval", "10"]
    variables = {"COPUS_RUN": run, "COPUS_TEST_STEP_S": "0.25"}
    job = cluster.submit("pretrain.sbatch", flags, *options, **variables)

    cluster.wait_for_steps(run, job, 0)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_for_restart(job, 1)
    saved = files.read_latest(run)
    assert saved is not None and saved == len(steps_of(run)) < STEPS
    comment = cluster.run("squeue", "-h", "-j", job, "-o", "%k")
    assert comment == f"tp1.pp1.dp2 B={BATCH}", "three ranks cannot share the batch"

    cluster.start_now(job)
    cluster.wait_for_steps(run, job, 1)
    first = cluster.fields(job)["BatchHost"]
    cluster.lose_node(first)
    cluster.wait_for_restart(job, 2)
    cluster.start_now(job)
    assert cluster.fields(job)["BatchHost"] != first
    cluster.return_node(first)

    cluster.wait_for_steps(run, job, 2)
    urgent = cluster.run("sbatch", "--parsable", "--nodes=3", "--exclusive", "--wrap", "true")
    cluster.wait_for_restart(job, 3)
    cluster.wait_for_end(urgent)
    cluster.start_now(job)
    cluster.wait_for_end(job)

    assert losses_of(run) == whole
    steps = [r["consumed_samples"] for r in steps_of(run)]
    assert steps == [BATCH * (i + 1) for i in range(STEPS)]


def test_another_layout_inside_the_allocation(
    cluster: Cluster, whole: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    write_profile(tmp_path / "profile.jsonl", 2)
    (tmp_path / "copus.yaml").write_text(SETTINGS)
    files_of_copus = ["--copus-config", tmp_path / "copus.yaml"]
    files_of_copus += ["--copus-profile", tmp_path / "profile.jsonl"]
    length = ["--train-samples", str(BATCH * FEWER)]
    flags = [*BASE, *length, *RELAUNCH.split(), *files_of_copus]
    job = cluster.submit("pretrain.sbatch", flags, "--nodes=2", COPUS_RUN=run)
    cluster.wait_for_end(job)
    starts = [r for r in read_metrics(run) if r["kind"] == "run.start"]
    assert [r["launch"] for r in starts] == [f"{job}.0.0", f"{job}.0.1"]
    before, after = (r["layout"] for r in starts)
    assert before == "tp1.pp1.dp2" and ".pp2." in after
    assert losses_of(run) == pytest.approx(whole[:FEWER], rel=1e-5)
    assert f"Comment={after} B={BATCH} " in cluster.run("scontrol", "show", "job", job)


def test_the_time_limit_is_not_reached(
    cluster: Cluster, whole: list[float], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # One pass over the text, as `whole` makes: the order of more passes is another one.
    long = [*BASE, "--train-samples", str(BATCH * 1000)]
    options = ["--nodes=2", "--time=60", "--signal=B:USR1@60"]
    variables = {"COPUS_RUN": run, "COPUS_TEST_STEP_S": "0.1"}
    job = cluster.submit("pretrain.sbatch", long, *options, **variables)
    cluster.wait_for_steps(run, job, 0)
    hours, minutes, seconds = map(int, cluster.fields(job)["RunTime"].split(":"))
    limit = 60 * hours + minutes + 1 + (seconds > 20)
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    cluster.wait_for_restart(job, 1)
    cluster.run("scancel", job)
    losses = losses_of(run)
    assert files.read_latest(run) == len(losses) > 0
    assert losses[:STEPS] == whole[: len(losses)]


def test_a_grid_of_runs(cluster: Cluster, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("--lr 1e-3\n# nothing\n--lr '2e-3' --global-batch-size 16")
    flags = [*BASE, "--train-samples", str(BATCH * 6)]
    variables = {"COPUS_SWEEP": lines, "COPUS_RUN": tmp_path / "sweep"}

    def sweep(*more: str) -> tuple[str, dict[str, str]]:
        """The array's number, and what each task said, once all have ended."""
        options = ["--array=1-3", "--output=%A-%a-%j.out"]
        job = cluster.submit("sweep.sbatch", [*flags, *more], *options, **variables)
        cluster.wait("the array", lambda: not cluster.run("squeue", "-h", "-j", job), job, 200)
        logs = cluster.work.glob(f"{job}-*.out")
        return job, {path.name.split("-")[1]: path.read_text() for path in logs}

    job, said = sweep()
    assert "line 2 is empty" in said["2"], said
    rates = {n: steps_of(tmp_path / "sweep" / n)[-1]["learning_rate"] for n in ("1", "3")}
    assert rates == {"1": 1e-3, "3": 2e-3}, said
    shown = cluster.run("scontrol", "show", "job", "--oneliner", job).splitlines()
    fields = re.compile(r"ArrayTaskId=(\d+).* Comment=(.*?) +Std")
    comments = {found for line in shown for found in fields.findall(line)}
    assert comments >= {("1", "tp1.pp1.dp1 B=8"), ("3", "tp1.pp1.dp1 B=16")}, "each task its own"
    _, again = sweep()
    assert again["1"] == "run 1 is done\n" and again["3"] == "run 3 is done\n"
    _, refused = sweep("--seed", "7")
    assert "begun with other flags" in refused["1"]


def test_times_of_layouts(cluster: Cluster, tmp_path: Path) -> None:
    store = tmp_path / "profile.jsonl"
    own = ["--max-micro-batch", "1", "--steps", "1", "--warm-up", "0", "--fix", "tp=1,pp=1"]
    variables: dict[str, str | Path] = {"COPUS_STORE": store}
    if sys.prefix != sys.base_prefix:
        variables |= {"COPUS_USE_PYTHON": "", "COPUS_VENV": sys.prefix}
    flags = [*own, "--global-batch-size", "8", "--", *FLAGS]
    job = cluster.submit("profile.sbatch", flags, "--ntasks-per-node=2", **variables)
    cluster.wait_for_end(job)
    text = [json.loads(line) for line in store.read_text().splitlines()]
    assert text[0]["machine"]["world_size"] == 2
    assert sum("step_s" in line for line in text) == 2


def test_ranks_follow_the_order_of_the_hostfile(cluster: Cluster, tmp_path: Path) -> None:
    """Nodes in the order of `tools/plan.py --hostfile`, over a real srun."""
    show = "import os; from copus_ext.launch.slurm import read_step; s = read_step(); "
    show += "print('rank', s.rank, os.environ['SLURMD_NODENAME'], s.head)"
    srun = ["srun", "--nodes=3", "--ntasks-per-node=2", "--cpu-bind=none"]
    said = cluster.run(*srun, sys.executable, "-c", show)
    named = sorted(line.split() for line in said.splitlines())
    usual = [words[2] for words in named[::2]]
    hosts = tmp_path / "hosts"
    hosts.write_text("\n".join(usual[::-1]))
    words = [*srun, f"--export=ALL,COPUS_HOSTFILE={hosts}", sys.executable, "-c", show]
    moved = sorted(line.split() for line in cluster.run(*words).splitlines())
    assert [w[2] for w in moved[::2]] == usual[::-1] == [w[2] for w in moved[1::2]]
    assert {w[3] for w in moved} == {usual[-1]}
