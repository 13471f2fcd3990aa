"""Trains with the gradients of groups of samples clipped, under several layouts and micro-batches,
and finds the gradient of each group by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import FURTHER, TINY, TINY_GPT2, layout_flags, run

GROUP, BATCH, STEPS = 4, 16, 5
LIMIT = "0.6"
ZERO = "--use-distributed-optimizer"
LAYOUTS = {
    "dp2": ZERO,
    "pp2": " ".join(layout_flags(1, 2, 1)),
    "tp2": " ".join([*layout_flags(2, 1, 1), "--sequence-parallel"]),
    "pp2 vpp2": " ".join(layout_flags(1, 2, 2)),
    "dp2 without": "",
}
MICRO = {
    "dp2": (1, 2, 4),
    "pp2": (1, 2, 4),
    "tp2": (1, 2, 4),
    "pp2 vpp2": (2,),
    "dp2 without": (2,),
}
ADAPTIVE = [("dp2", 1), ("pp2", 1), ("pp2", 4), ("tp2", 4), ("pp2 vpp2", 2)]
UNLIMITED = ("dp2", "pp2", "tp2")
MODELS = {
    "tied": (TINY_GPT2, f"{LAYOUTS['pp2']} {ZERO} --logits-chunks 2"),
    "recomputed": (
        FURTHER,
        f"{ZERO} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}
"""Base and flags of models whose parameters get gradients in other ways."""
LENGTH = f"--clip-grad 0 --train-samples {BATCH * STEPS}"


def main(output: Path) -> Any:
    """Returns losses, gradient norms and group norms of every run, and what groups are alone."""
    import torch
    import torch.distributed as dist

    from copus_ext.gns.hooks import CONTROL_SET, GROUPS, measured_parameters
    from megatron.trainer.train import build
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Look(Callback):
        """Sees the reduced gradient of every step, and the norms of its groups in order."""

        def __init__(self) -> None:
            self.features: list[Any] = []
            self.norms: list[list[float]] = []
            self.counted: list[float] = []
            self.gradients: list[Any] = []
            self.clips: list[Any] = []

        def build(self, *args: Any, **more: Any) -> Any:
            self.features.append(make(*args, **more))
            return self.features[-1]

        def on_grads_ready(self, context: CallbackContext) -> None:
            grads = [b.grad_data.clone() for c in context.model for b in c.buffers]
            self.gradients.append(torch.cat(grads).double())
            squares = torch.zeros((), dtype=torch.float64)
            for m in measured_parameters(context.model, context.groups):
                if GROUPS[m.group] in CONTROL_SET:
                    squares += m.param.main_grad.double().square().sum()  # pyright: ignore[reportAttributeAccessIssue]
            dist.all_reduce(squares, group=context.groups.mp)
            self.counted.append(squares.sqrt().item())
            if not (of_run := self.features[-1]):
                return
            (clip,) = of_run
            self.clips.append(clip)
            own = torch.stack(clip.norms)
            every = [torch.zeros_like(own) for _ in range(context.groups.dp.size())]
            dist.all_gather(every, own, group=context.groups.dp)
            # Replicas take turns.
            self.norms.append(torch.stack(every, 1).flatten().tolist())

    make, rows = build.build_features, {}

    def record(name: str, flags: str, micro: int, more: str, base: str = TINY) -> Look:
        look = Look()
        flags += f" --micro-batch-size {micro} --global-batch-size {BATCH} {LENGTH} {more}"
        with patch.object(build, "build_features", look.build):
            steps = run(flags.split(), output / name.replace(" ", "_"), [look], base=base)
        rows[name] = {
            "losses": [s["losses"]["lm loss"] for s in steps],
            "grad_norms": [s["grad_norm"] for s in steps],
            "norms": look.norms,
            "waiting": [clip.peak_waiting for clip in look.clips[-1:]],
        }
        return look

    clipped = f"--clip-group-size {GROUP} --clip-group-norm"
    first: dict[str, Any] = {}
    for layout, sizes in MICRO.items():
        for micro in sizes:
            flags = LAYOUTS[layout]
            look = record(f"{layout} {micro} limit", flags, micro, f"{clipped} {LIMIT}")
            first[f"{layout} limit"] = look.gradients[0]
    for layout, micro in ADAPTIVE:
        flags = LAYOUTS[layout]
        look = record(f"{layout} {micro} adaptive", flags, micro, f"{clipped} adaptive")
        first[f"{layout} adaptive"] = look.gradients[0]
    for how, more in (("infinite", f"{clipped} inf"), ("off", "")):
        for layout in UNLIMITED:
            record(f"{layout} {GROUP} {how}", LAYOUTS[layout], GROUP, more)
        for model, (base, flags) in MODELS.items():
            record(f"{model} {how}", flags, GROUP, f"{more} --train-samples {2 * BATCH}", base)
    # Every group as a batch of its own, with the first weights.
    alone: dict[str, Any] = {}
    for layout in ("pp2", "tp2"):
        flags = f"--global-batch-size {GROUP} --lr 0 --train-samples {BATCH}"
        look = record(f"{layout} alone", LAYOUTS[layout], 1, flags)
        norms, grads = look.counted, look.gradients
        limit = {
            "limit": [min(1.0, float(LIMIT) / norm) for norm in norms],
            "adaptive": [min(norms) / norm for norm in norms],
        }
        off = {}
        for how, scales in limit.items():
            want = torch.stack([s * g for s, g in zip(scales, grads)]).mean(0)
            parts = torch.stack([(first[f"{layout} {how}"] - want).norm(), want.norm()])
            dist.all_reduce(parts, op=dist.ReduceOp.MAX)
            off[how] = (parts[0] / parts[1]).item()
        alone[layout] = {"norms": norms, "off": off}
    # Validation between the steps, and a second launch.
    more = f"{clipped} {LIMIT}"
    record("evaluated", LAYOUTS["pp2"], 2, f"{more} --eval-iters 1 --eval-interval 1")
    saved = f"{more} --save {output / 'saved'} --load {output / 'saved'} --save-interval 100"
    record("begun", ZERO, 2, f"{saved} --exit-interval 3")
    record("resumed", ZERO, 4, saved)
    return {"rows": rows, "alone": alone}
