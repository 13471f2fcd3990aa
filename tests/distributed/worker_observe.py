"""Trains the same steps plain and under `--copus --copus-mode observe`, as the command does."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from tests.helpers.jobs import MOE, TINY, steps_of

EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
RUNS = {
    "dropout": f"{TINY} --hidden-dropout 0.1 --attention-dropout 0.1",
    "balance of micro-batches": f"{MOE} --moe-aux-loss-coeff 0.1 {EP2}",
    "exact balance": f"{MOE} --moe-aux-loss-coeff 0.1 --moe-balance exact",
    "two balances": f"{MOE} --moe-router-load-balancing-type aux_loss seq_aux_loss "
    "--moe-aux-loss-coeff 0.1 0.1",
    "balance of the world": f"{MOE} --moe-router-load-balancing-type global_aux_loss "
    "--moe-aux-loss-coeff 0.1",
    "capacity": f"{MOE} --moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 1.0 {EP2}",
    "bias": f"{MOE} --moe-router-enable-expert-bias --moe-router-score-function sigmoid",
}
"""Name -> flags."""


DAILY = ("dropout", "balance of micro-batches", "bias")
"""The runs of every commit."""


def main(output: Path, *words: str) -> Any:
    import torch.distributed as dist

    from copus_ext.commands.pretrain import _train

    results: dict[str, Any] = {}
    for name in RUNS if words else DAILY:
        for mode in ("", "--copus --copus-mode observe"):
            key, out = f"{name} observed" if mode else name, io.StringIO()
            folder = output / key.replace(" ", "_")
            own = f"{RUNS[name]} --train-iters 4 {mode} --run-dir {folder}"
            with contextlib.redirect_stdout(out):
                assert _train(own.split()) == 0
            if dist.get_rank() == 0:
                steps = [
                    {key: step[key] for key in ("losses", "grad_norm", "learning_rate")}
                    | {"noise": step.get("noise")}
                    for step in steps_of(folder)
                ]
                notes = [line for line in out.getvalue().splitlines() if line.startswith("note: ")]
                results[key] = {"steps": steps, "notes": notes}
    return results
