"""The files for Kubernetes, SkyPilot and Ray are what their engines read, and agree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kubeflow_trainer_api import models

from tests.helpers.launch import ROOT
from tests.helpers.manifests import container_of, documents, pods_of_runtime


def check(kind: str, value: Any) -> None:
    """Reads a value with the models of the API; what they leave out is no field of it."""
    found = getattr(models, kind).from_dict(value)
    assert found.to_dict() == value


def test_kubeflow_knows_every_field() -> None:
    runtime, job = documents("kubernetes/kubeflow.yaml")
    check("TrainerV1alpha1ClusterTrainingRuntime", runtime)
    check("TrainerV1alpha1TrainJob", job)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    # Where the trainer looks for the container to change.
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = nodes["template"]["metadata"]["labels"]
    assert nodes["name"] == "node" == container_of(pods_of_runtime(runtime))["name"]
    assert labels["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    with pytest.raises(AssertionError):
        check("TrainerV1alpha1TrainJob", {**job, "spec": {**job["spec"], "nodes": 2}})


def test_kubernetes_knows_every_field_of_the_job() -> None:
    service, job = documents("kubernetes/job.yaml")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    check("IoK8sApiBatchV1JobSpec", job["spec"])
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    # The name of node 0: pod 0 of the Job, in the domain of the Service.
    name, domain = job["metadata"]["name"], service["metadata"]["name"]
    pods = job["spec"]["template"]
    assert f"--rdzv-endpoint={name}-0.{domain}:29500" in container_of(pods)["args"]
    assert pods["spec"]["subdomain"] == domain
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
    }
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == 2
    assert f"--nnodes={spec['completions']}" in container_of(pods)["args"]


def test_both_engines_of_kubernetes_treat_a_pod_alike() -> None:
    _, job = documents("kubernetes/job.yaml")
    runtime, train_job = documents("kubernetes/kubeflow.yaml")
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    one, other = job["spec"], nodes["template"]["spec"]
    for name in ("backoffLimit", "podFailurePolicy", "successPolicy"):
        assert one[name] == other[name]
    first, second = (dict(spec["template"]["spec"]) for spec in (one, other))
    (own,), (theirs,) = first.pop("containers"), second.pop("containers")
    del first["subdomain"]
    assert first == second
    for name in ("image", "resources", "volumeMounts"):
        assert own[name] == theirs[name]
    words = own["args"][own["args"].index("--") + 1 :]
    assert words == train_job["spec"]["trainer"]["args"]


def test_the_file_for_skypilot_has_no_other_field_and_restarts_at_85() -> None:
    (task,) = documents("skypilot.yaml")
    names = {"name", "workdir", "num_nodes", "resources", "volumes", "envs", "setup", "run"}
    assert set(task) == names
    assert task["envs"] == {"FLAGS": None}, "must be given"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [85]


def test_the_script_for_ray_says_what_it_takes_without_ray() -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "scripts/ray_train.py"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--num-nodes" in shown.stdout and "starts a worker on each node" in shown.stdout


RAY = {
    "ray/__init__.py": """
class Handle:
    def __init__(self, own):
        self.own = own
    def __getattr__(self, name):
        return Method(getattr(self.own, name))
class Method:
    def __init__(self, call):
        self.remote = call
def init(**options): pass
def get(value): return value
def remote(**options): return lambda cls: Method(lambda: Handle(cls()))
""",
    "ray/train/__init__.py": """
from types import SimpleNamespace
FailureConfig = RunConfig = ScalingConfig = SimpleNamespace
""",
    "ray/train/torch.py": """
import os
from types import SimpleNamespace
TorchConfig = SimpleNamespace
class TorchTrainer:
    def __init__(self, node, *, train_loop_config, scaling_config, run_config, torch_config):
        self.node, self.config, self.num = node, train_loop_config, scaling_config.num_workers
        self.starts = 1 + run_config.failure_config.max_failures
    def fit(self):
        os.environ |= {"WORLD_SIZE": str(self.num), "MASTER_ADDR": "127.0.0.1"}
        for start in range(self.starts):
            print(f"start {start}", flush=True)
            try:
                for rank in range(self.num):
                    os.environ["RANK"] = str(rank)
                    self.node(self.config)
                return
            except RuntimeError as error:
                last = error
        raise last
""",
}
"""As much of Ray as the script uses: a failed worker has all of them started again."""


@pytest.mark.parametrize(
    ("flags", "starts", "code"),
    [
        pytest.param(["--no-such-flag"], 1, 2, id="refused"),
        pytest.param(["--run-dir", "/dev/null/x", "--lr", "1e-3"], 3, 1, id="failed"),
    ],
)
def test_ray_starts_refused_flags_once(
    tmp_path: Path, flags: list[str], starts: int, code: int
) -> None:
    for name, text in RAY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own = ["--num-nodes", "1", "--gpus-per-node", "0", "--max-failures", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/ray_train.py"), *own, "--", *flags],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.stdout.count("start "), done.returncode) == (starts, code), done.stderr
    refused = done.stderr.partition("refused, so it is not started again:\n")[2]
    assert bool(refused) == (code == 2), done.stderr
    assert "--no-such-flag" in refused or code == 1
