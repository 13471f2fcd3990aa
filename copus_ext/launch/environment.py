"""Lets `srun python pretrain_gpt.py` find its place in the world as under torchrun."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from copus_ext.launch.slurm import address_of, read_step


def adopt_srun(env: MutableMapping[str, str] | None = None) -> bool:
    """Sets RANK, WORLD_SIZE and the like from what srun says.

    Does nothing under torchrun or another launcher that set RANK, in a plain shell, in the shells
    of salloc and sbatch, and where srun started one process only. MASTER_ADDR and MASTER_PORT of
    the user win. A process that sees one GPU takes it, whatever its number on the node.

    Args:
        env: environment to complete; None takes that of the process.

    Returns:
        Whether it did something.

    Raises:
        UsageError: one line, if SLURM's variables make no sense.
    """
    env = os.environ if env is None else env
    step = None if "RANK" in env else read_step(env)
    if step is None or step.num_tasks == 1:
        return False
    gpus = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    env.update(
        RANK=str(step.rank),
        WORLD_SIZE=str(step.num_tasks),
        LOCAL_RANK="0" if len(gpus) == 1 else str(step.local_rank),
        LOCAL_WORLD_SIZE=str(step.num_local_tasks),
        GROUP_RANK=str(step.node_rank),
    )
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = address_of(step.head)
    env.setdefault("MASTER_PORT", str(step.port))
    return True
