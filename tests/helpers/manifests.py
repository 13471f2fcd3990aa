"""The commands of the files for clusters, as each engine would start them: on two nodes of this
machine, with a user's flags in place of FLAGS."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.helpers.launch import ROOT

NODES = 2
_SCRIPTS = ROOT / "scripts"
_HERE = "127.0.0.1"
_RUN, _EVERY = "/runs/x", "500"
"""Directory of the run, and steps between two checkpoints, as in the files."""


@dataclass(frozen=True, kw_only=True)
class Use:
    """What is put into a file."""

    flags: Sequence[str]
    run_dir: Path
    save_interval: int
    port: int
    """On which the nodes meet."""


Start = tuple[list[str], dict[str, str]]
"""A command, and what the engine adds to its environment."""
Engine = Callable[[int, Use], Start]
"""How an engine starts a node, by its number."""


def documents(name: str) -> list[Any]:
    """The documents of a file in scripts/."""
    return list(yaml.safe_load_all((_SCRIPTS / name).read_text()))


def container_of(pods: Any) -> Any:
    """The container of a pod template."""
    (container,) = pods["spec"]["containers"]
    return container


def pods_of_runtime(runtime: Any) -> Any:
    """The pod template of a ClusterTrainingRuntime."""
    (nodes,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return nodes["template"]["spec"]["template"]


def indexed_job(node: int, use: Use) -> Start:
    """A pod of a Job; Kubernetes sets one variable, and the name of node 0 is its address."""
    _, job = documents("kubernetes/job.yaml")
    container = container_of(job["spec"]["template"])
    words = [*container["command"], *container["args"]]
    words = [word.replace("copus-0.copus:29500", f"{_HERE}:{use.port}") for word in words]
    return _in_container(words, {"JOB_COMPLETION_INDEX": str(node)}, use)


def kubeflow(node: int, use: Use) -> Start:
    """A pod of a TrainJob, with the variables of the trainer's torch plugin."""
    runtime, job = documents("kubernetes/kubeflow.yaml")
    trainer = job["spec"]["trainer"]
    env = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "auto"}
    env |= {"PET_NODE_RANK": str(node), "PET_MASTER_ADDR": _HERE, "PET_MASTER_PORT": str(use.port)}
    return _in_container(
        [*container_of(pods_of_runtime(runtime))["command"], *trainer["args"]], env, use
    )


def skypilot(node: int, use: Use) -> Start:
    """A node of a task, whose command is for a shell."""
    (task,) = documents("skypilot.yaml")
    env = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_RANK": str(node)}
    env |= {"SKYPILOT_NODE_IPS": "\n".join([_HERE] * NODES), "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    env["FLAGS"] = shlex.join(use.flags)
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    text = task["run"].replace(_RUN, str(use.run_dir)).replace(":29500", f":{use.port}")
    text = text.replace(f"--save-interval {_EVERY}", f"--save-interval {use.save_interval}")
    return ["bash", "-c", text], env


def ray(node: int, use: Use) -> Start:
    """What a worker of Ray Train calls, with the variables of Ray's TorchTrainer."""
    flags = [*use.flags, "--save-interval", str(use.save_interval), "--force-unlock"]
    for name in ("--run-dir", "--save", "--load"):
        flags += [name, str(use.run_dir)]
    env = {"RANK": str(node), "NODE_RANK": str(node), "WORLD_SIZE": str(NODES)}
    env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": _HERE, "MASTER_PORT": "1"}  # Ray's own, and taken
    script, config = str(_SCRIPTS / "ray_train.py"), {"flags": flags, "port": use.port}
    return [sys.executable, "-c", _WORKER.format(script=script, config=config)], env


_WORKER = """
import runpy
script = runpy.run_path({script!r})
script["train_node"].__globals__["said"] = lambda method, *words: method(*words)
script["train_node"]({config!r} | {{"refused": script["Refused"]()}})
"""
"""A worker whose actor is an object of its own."""


def _in_container(words: Sequence[str], env: dict[str, str], use: Use) -> Start:
    """The words of a container as kubelet reads them."""
    command: list[str] = []
    for word in words:
        if word == "FLAGS":
            command += use.flags
            continue
        word = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word)
        word = word.replace(f"--save-interval={_EVERY}", f"--save-interval={use.save_interval}")
        command.append(word.replace(_RUN, str(use.run_dir)))
    assert command[0] == "python"
    return [sys.executable, *command[1:]], env
