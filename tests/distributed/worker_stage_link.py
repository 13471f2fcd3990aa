"""Trains pipelines with whole and with short messages between stages, in the same processes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import TINY, layout_flags, run

SHORT = "--pipeline-message-bits 8"
LAYOUTS = {"pp2": (1, 2, 1), "pp4": (1, 4, 1), "pp2 vpp2": (1, 2, 2), "tp2 pp2": (2, 2, 1)}
STEPS = 20


def main(output: Path) -> Any:
    """Returns losses and gradient norms, bytes of messages, and what was measured."""
    import torch.distributed as dist

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from megatron.training.train import build

    sent: list[int] = []
    real = {name: getattr(dist, name) for name in ("isend", "batch_isend_irecv")}
    rows: dict[str, Any] = {}
    make = build.build_model

    def without_link(*args: Any, **more: Any) -> Any:
        return dataclasses.replace(make(*args, **more), link=None)

    def batched(ops: Any) -> Any:
        sent.extend(o.tensor.nbytes for o in ops if o.op is real["isend"])
        return real["batch_isend_irecv"](ops)

    def record(name: str, layout: str, more: str, *, measured: bool = False) -> None:
        sent.clear()
        flags = [*layout_flags(*LAYOUTS[layout]), *more.split(), "--train-iters", str(STEPS)]
        noise = CopusConfig(copus=True, copus_gns_interval=1)
        callbacks = [GradientNoiseCallback(noise)] if measured else []
        base = f"{TINY} --log-interval 1"
        steps = run(flags, output / name.replace(" ", "_"), callbacks, base=base)
        rows[name] = {
            "numbers": [[s["losses"]["lm loss"], s["grad_norm"]] for s in steps],
            "bytes": sum(sent),
            "noise": [s["noise"]["squares"] for s in steps] if measured else [],
        }

    with patch.object(dist, "batch_isend_irecv", batched):
        for layout in LAYOUTS:
            record(f"{layout} whole", layout, "")
            record(f"{layout} short", layout, SHORT)
            with patch.object(build, "build_model", without_link):
                record(f"{layout} without", layout, "")
        record("pp2 measured whole", "pp2", "", measured=True)
        record("pp2 measured short", "pp2", SHORT, measured=True)
    return rows
