"""Trains on a Ray cluster: Ray Train starts a worker on each node, and that one our launcher.

    python scripts/ray_train.py --num-nodes 2 --gpus-per-node 8 -- FLAGS

FLAGS are those of pretrain_gpt.py, with `--run-dir`, `--save` and `--load` in a folder that all
nodes can write, and `--force-unlock`. The nodes need the packages of requirements/run.txt; Ray
brings them the repository, which is the current folder. When a worker fails, Ray ends all and
starts all again. Flags that are refused end it at once, with exit code 2 and the message.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections import deque
from typing import Any

SUPERVISOR = """
import sys
from megatron.trainer.common.child_processes import end_with_parent
end_with_parent(int(sys.argv.pop(1)))
from copus_ext.launch.supervisor import main
sys.exit(main())
"""
"""Ray may kill a worker, and its supervisor must not go on."""
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_PORT")
"""Variables in which Ray describes its workers; our ranks are others."""
REFUSED = 2
"""Exit code of wrong flags, configuration or data, which another start does not mend."""
LOOK_S = 5
SHOWN = 10
"""Last lines of a refused node that are shown once more at the end."""


def train_node(config: dict[str, Any]) -> None:
    """Supervises the ranks of one node, in a worker of Ray's TorchTrainer, whose variables say
    which node this is and where the first one is.

    Args:
        config: `flags` of the run, the `port` on which the nodes meet, and the actor that keeps the
            words of nodes that are `refused`.

    Raises:
        RuntimeError: the supervisor left with another code than 0 and 2; Ray then starts all nodes
            again.
    """
    env = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
    endpoint = f"{env.pop('MASTER_ADDR')}:{config['port']}"
    own = ["--nnodes", os.environ["WORLD_SIZE"], "--node-rank", os.environ["RANK"]]
    own += ["--rdzv-endpoint", endpoint, "--", *config["flags"]]
    command = [sys.executable, "-c", SUPERVISOR, str(os.getpid()), *own]
    last = deque[str](maxlen=SHOWN)
    taken = {"stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env=env, **taken) as child:
        assert child.stderr is not None
        threading.Thread(
            target=end_if_refused, args=(child, config["refused"]), daemon=True
        ).start()
        for line in child.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last.append(line)
    if child.returncode == REFUSED:
        said(config["refused"].add, "".join(last))
    elif child.returncode and not said(config["refused"].words):
        raise RuntimeError(
            f"node {os.environ['RANK']}: the supervisor left with {child.returncode}"
        )


def end_if_refused(child: subprocess.Popen[str], refused: Any) -> None:
    """Ends the supervisor of this node once another node was refused, for which it would wait."""
    while child.poll() is None:
        time.sleep(LOOK_S)
        if said(refused.words):
            child.terminate()
            return


def said(method: Any, *words: str) -> Any:
    """Calls a method of the actor."""
    import ray  # pyright: ignore[reportMissingImports]

    return ray.get(method.remote(*words))


class Refused:
    """The last words of nodes that were refused, kept outside of their workers."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def add(self, words: str) -> None:
        self._words.append(words)

    def words(self) -> list[str]:
        return self._words


def main() -> int:
    """Trains; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-nodes", type=int, default=2)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--port", type=int, default=29500, help="free on the first node")
    parser.add_argument("--max-failures", type=int, default=10, help="starts after the first")
    parser.add_argument("flags", nargs="+", help="of pretrain_gpt.py, after --")
    args = parser.parse_args()

    import ray  # pyright: ignore[reportMissingImports]
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore[reportMissingImports]
    from ray.train.torch import TorchConfig, TorchTrainer  # pyright: ignore[reportMissingImports]

    ray.init(runtime_env={"working_dir": ".", "excludes": [".git", ".venv", "runs"]})
    refused = ray.remote(num_cpus=0)(Refused).remote()
    trainer = TorchTrainer(
        train_node,
        train_loop_config={"flags": args.flags, "port": args.port, "refused": refused},
        torch_config=TorchConfig(backend="gloo"),  # between the workers; it holds no GPU
        scaling_config=ScalingConfig(
            num_workers=args.num_nodes,
            use_gpu=args.gpus_per_node > 0,
            resources_per_worker={"CPU": 1, "GPU": args.gpus_per_node},
            placement_strategy="STRICT_SPREAD",
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=args.max_failures)),
    )
    trainer.fit()
    if words := said(refused.words):
        print(f"ray_train: refused, so it is not started again:\n{words[0]}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
