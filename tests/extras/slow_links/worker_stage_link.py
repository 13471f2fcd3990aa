"""Trains pipelines with whole messages between stages, with messages of 8 bits and with gradients
of low rank at the end of a step, in the same processes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import TINY, layout_flags, run

SHORT = "--pipeline-message-bits 8"
LAYOUTS = {
    "pp2": (1, 2, 1),
    "pp4": (1, 4, 1),
    "pp2 vpp2": (1, 2, 2),
    "pp4 vpp2": (1, 4, 2),
    "pp4 vpp2 waiting": (1, 4, 2),
    "tp2 pp2": (2, 2, 1),
}
MORE = {
    "pp4 vpp2": "--num-layers 8",
    "pp4 vpp2 waiting": "--num-layers 8 --no-overlap-p2p-communication",
}
LOW = {"pp2": 2, "pp4": 3 + 2 + 1, "tp2 pp2": 2}
"""Layouts for gradients of low rank, and how many messages of a step are, over all ranks."""
RANK = 4
STEPS = 8


def main(output: Path) -> Any:
    """Returns losses and gradient norms, bytes of messages, and what was measured."""
    import torch
    import torch.distributed as dist

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from megatron.trainer.extras.slow_links import low_rank
    from megatron.trainer.extras.slow_links.stage_link import StageLink

    sent: list[int] = []
    real = {name: getattr(dist, name) for name in ("isend", "batch_isend_irecv")}
    rows: dict[str, Any] = {}

    def alone(tensor: Any, **more: Any) -> Any:
        """An interleaved pipeline sends one by one."""
        sent.append(tensor.nbytes)
        return real["isend"](tensor, **more)

    def batched(ops: Any) -> Any:
        sent.extend(o.tensor.nbytes for o in ops if o.op is real["isend"])
        return real["batch_isend_irecv"](ops)

    def record(name: str, layout: str, more: str, *, measured: bool = False) -> None:
        sent.clear()
        flags = [*layout_flags(*LAYOUTS[layout]), *MORE.get(layout, "").split(), *more.split()]
        flags += ["--train-iters", str(STEPS)]
        noise = CopusConfig(copus=True, copus_gns_interval=1)
        callbacks = [GradientNoiseCallback(noise)] if measured else []
        base = f"{TINY} --log-interval 1"
        steps = run(flags, output / name.replace(" ", "_"), callbacks, base=base)
        everywhere = torch.tensor(sum(sent))
        dist.all_reduce(everywhere)
        rows[name] = {
            "numbers": [[s["losses"]["lm loss"], s["grad_norm"]] for s in steps],
            "bytes": everywhere.item(),
            "noise": [s["noise"]["squares"] for s in steps] if measured else [],
        }

    with patch.object(dist, "batch_isend_irecv", batched):
        for layout, (*_, vpp) in LAYOUTS.items():
            with patch.object(dist, "isend", alone) if vpp > 1 else nullcontext():
                record(f"{layout} whole", layout, "")
                record(f"{layout} short", layout, SHORT)
            with patch.object(StageLink, "_codec", lambda *args, **more: None):
                record(f"{layout} linked", layout, SHORT)
        for layout in LOW:
            record(f"{layout} low", layout, f"--pipeline-message-rank {RANK}")
            with patch.object(low_rank, "is_shorter", lambda *sizes: True):
                record(f"{layout} full", layout, "--pipeline-message-rank 1000")
        record("pp2 measured whole", "pp2", "", measured=True)
        record("pp2 measured short", "pp2", SHORT, measured=True)
        record("pp2 measured low", "pp2", f"--pipeline-message-rank {RANK}", measured=True)
    return rows
