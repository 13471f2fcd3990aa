"""Makes the controller follow a list of changes in place of its own decisions."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch.distributed as dist


def follow(text: str) -> None:
    """Puts the list in place, before the run starts.

    Args:
        text: `STEP:LAYOUTS:BATCH:MICRO_BATCH`, separated by commas: what the steps after one have.
            Several layouts with `>` between them come one after the other at the same boundary; one
            with `!PHASE` behind it fails on rank 1 in that phase, and with `!!PHASE` rank 1 is
            killed in it. In place of layouts `!!` kills rank 1 there. Behind step 0 `!PHASE` alone
            breaks the change at the start, back to the layout that a resumed run had.
    """
    from copus_ext.controller.callback import Controller
    from copus_ext.controller.layout_changes import LayoutChange, LayoutChangeManager
    from megatron.trainer.common.step_settings import Request
    from megatron.trainer.config.layout import Layout

    wanted = {int(row.split(":")[0]): row.split(":")[1:] for row in text.split(",")}

    def apply(self: Any, decision: Any, context: Any) -> Request | None:
        if context.state.iteration not in wanted:
            return None
        layouts, batch, micro = wanted[context.state.iteration]
        if layouts == "!!":
            _strike("!", "")
        sizes = self._settings(int(batch), int(micro), None, context)
        if layouts == str(context.config.layout):
            return Request(kind="change", reason="as listed", settings=sizes)
        requests = [
            (fault, self.layout_changes.request, _change(LayoutChange, Layout, to, sizes))
            for to, _, fault in (item.partition("!") for item in layouts.split(">"))
        ]

        def moves(host: Any) -> None:
            for fault, request, change in requests:
                self.layout_changes.fault = functools.partial(_strike, fault)
                request(change, context).move(host)
                _holds(host)

        return Request(kind="change", reason="as listed", move=moves)

    plain: Any = Controller
    plain._is_due = lambda self, context, scheduled: False
    plain._apply = apply
    at_start = wanted.get(0, [""])[0].removeprefix("!")
    manager: Any = LayoutChangeManager
    begin = manager.open

    def opened(self: Any, context: Any) -> None:
        begin(self, context)
        self.fault = functools.partial(_strike, at_start)

    manager.open = opened


def _change(kind: Any, layout: Any, to: str, settings: Any) -> Any:
    about = {"number": 1, "reason": "as listed", "done": _told}
    return kind(to=layout.from_text(to), settings=settings, **about)


def _strike(fault: str, topic: str) -> None:
    if dist.get_rank() != 1:
        return
    if fault == f"!{topic}":
        os.kill(os.getpid(), signal.SIGKILL)
    if topic and topic == fault:
        raise RuntimeError("broken on purpose")


def _holds(host: Any) -> None:
    """Says what rank 0 holds of the state, and what the check before a change expects of it."""
    from copus_ext.megatron_lm.move_memory import state_bytes
    from megatron.trainer.model.shards import parts_of

    target, model, optimizer, _ = host.present
    weights = [weight for chunk in model.chunks for weight in chunk.parameters()]
    held = sum(weight.numel() * (weight.element_size() + 4) for weight in weights)
    is_fp32 = weights[0].element_size() == 4  # which are masters then
    for part in parts_of(optimizer):
        for master, state in part.optimizer.state.items() if part.optimizer else ():
            kept = [x for x in state.values() if hasattr(x, "numel")] + [master] * (not is_fp32)
            held += sum(x.numel() * x.element_size() for x in kept)
    if dist.get_rank() == 0:
        about = {"held": held, "expected": state_bytes(target, 0), "layout": str(target.layout)}
        print("HOLDS " + json.dumps(about), flush=True)


def _told(outcome: Any) -> None:
    if dist.get_rank() == 0:
        found = {"kind": outcome.kind, "reason": outcome.reason, "pause_s": outcome.pause_s}
        print("MOVE " + json.dumps(found | resources()), flush=True)


def resources() -> dict[str, int]:
    """What a process must not have more of after each change."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }
