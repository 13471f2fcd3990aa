"""Becomes torchrun on an emulated node: `worker_on_node.py NAME,... SCRIPT FLAGS`, one a node."""

from __future__ import annotations

import os
import sys

from tests.helpers.network_namespaces import DEVICE, address

names = sys.argv[1].split(",")
rank = os.environ["RANK"]
dropped = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"}
env = {name: value for name, value in os.environ.items() if name not in dropped}
launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(names))]
launcher += ["--node-rank", rank, "--nproc-per-node", "1"]
launcher += ["--master-addr", address(0), "--master-port", "29571"]
words = ["ip", "netns", "exec", names[int(rank)], *launcher, *sys.argv[2:]]
os.execvpe(words[0], words, {**env, "GLOO_SOCKET_IFNAME": DEVICE})
