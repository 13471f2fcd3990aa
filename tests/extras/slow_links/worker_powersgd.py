"""Trains with whole and with compressed gradients, in the same processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import MOE, TINY, TINY_GPT2, layout_flags, run

ZERO = "--use-distributed-optimizer"
STEPS, FEW = 20, 4
RANK = 4
FULL = f"--train-iters {STEPS} --grad-compression-rank 1000"
CASES = {
    "plain": (TINY, ""),
    "sharded": (TINY, ZERO),
    "sharded in small buckets": (TINY, f"{ZERO} --ddp-bucket-size 5000"),
    "context": (TINY, f"--context-parallel-size 2 {ZERO}"),
    "tied pipeline": (TINY_GPT2, f"--pipeline-model-parallel-size 2 {ZERO}"),
    "experts": (MOE, f"--expert-model-parallel-size 2 {ZERO}"),
}
SHORT = {"plain": "", "sharded": ZERO, "sharded bf16": f"{ZERO} --bf16 --grad-reduce-in-bf16"}


@contextlib.contextmanager
def all_matrices() -> Iterator[None]:
    """Also those whose factors are longer than themselves."""
    from megatron.trainer.extras.slow_links import powersgd

    with patch.object(powersgd, "is_shorter", lambda *sizes: True):
        yield


def short_groups(context: Any) -> list[Any]:
    """The groups of buckets of this rank that hold compressed matrices."""
    return [g for c in context.model for g in c.bucket_groups if hasattr(g, "matrices")]


def full_rank(output: Path) -> dict[str, Any]:
    """Losses and gradient norms of every case, whole and with factors of full rank."""
    rows: dict[str, Any] = {}
    for name, (base, flags) in CASES.items():
        for label, more in (("whole", f"--train-iters {STEPS}"), ("full", FULL)):
            with all_matrices():
                folder = output / f"{name}-{label}".replace(" ", "-")
                steps = run([*flags.split(), *more.split()], folder, base=base)
            rows[f"{name} {label}"] = [[s["losses"]["lm loss"], s["grad_norm"]] for s in steps]
    return rows


def measured(output: Path) -> dict[str, Any]:
    """Noise of every second step with compression on and off, the weights standing still; and the
    sizes of the residuals after each step."""
    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Residuals(Callback):
        def __init__(self) -> None:
            self.sizes: list[float] = []

        def on_train_step_end(self, context: CallbackContext) -> None:
            matrices = [m for group in short_groups(context) for m in group.matrices]
            self.sizes.append(sum(m.residual.double().norm().item() for m in matrices))

    rows: dict[str, Any] = {}
    for estimator in ("rank", "micro"):
        for rank in (0, RANK):
            noise = CopusConfig(copus=True, copus_gns_interval=2, copus_gns_estimator=estimator)
            residuals = Residuals()
            flags = f"--lr 0 --train-iters {FEW} --grad-compression-rank {rank} {ZERO}".split()
            callbacks = [GradientNoiseCallback(noise), residuals]
            steps = run(flags, output / f"{estimator}-{rank}", callbacks)
            rows[f"{estimator} {rank}"] = {
                "squares": [s["noise"].get("squares") for s in steps],
                "norms": [s["grad_norm"] for s in steps],
                "residuals": residuals.sizes,
            }
    return rows


def sums(output: Path) -> dict[str, Any]:
    """What went into the reductions of some steps and what came out, and how many bytes."""
    import torch
    import torch.distributed as dist

    from megatron.trainer.train.callbacks import Callback, CallbackContext

    sent: list[int] = []
    real = {name: getattr(dist, name) for name in ("all_reduce", "reduce")}

    def counting(name: str) -> Any:
        def collective(tensor: Any, *args: Any, **more: Any) -> Any:
            sent.append(tensor.nbytes)
            return real[name](tensor, *args, **more)

        return collective

    class Look(Callback):
        """Wraps the reduction as the noise measurement does."""

        def __init__(self) -> None:
            self.totals: dict[Any, list[Any]] = {}
            self.groups: list[Any] = []

        def on_train_start(self, context: CallbackContext) -> None:
            self.groups = short_groups(context)
            self.all_groups = [g for c in context.model for g in c.bucket_groups]
            for group in self.groups:
                self.wrap(group, context.groups.dp_cp)

        def wrap(self, group: Any, replicas: Any) -> None:
            start = group.start_grad_sync

            def start_grad_sync(*args: Any, **more: Any) -> None:
                before = [m.param.main_grad.double() / replicas.size() for m in group.matrices]
                for one in before:
                    real["all_reduce"](one, group=replicas)
                with contextlib.ExitStack() as stack:
                    for name in real:
                        stack.enter_context(patch.object(dist, name, counting(name)))
                    start(*args, **more)
                for m, one in zip(group.matrices, before):
                    zeros = [torch.zeros_like(one), torch.zeros_like(one)]
                    into, out = self.totals.setdefault(m, zeros)
                    into += one
                    out += m.param.main_grad.double()

            group.start_grad_sync = start_grad_sync

        def on_train_end(self, context: CallbackContext) -> None:
            self.off, self.lost = 0.0, 0.0
            for m, (into, out) in self.totals.items():
                rest = m.residual.double()
                real["all_reduce"](rest, group=context.groups.dp_cp)
                self.off = max(self.off, ((out + rest - into).norm() / into.norm()).item())
                self.lost = max(self.lost, (rest.norm() / into.norm()).item())
            self.shapes = [list(m.param.shape) for g in self.groups for m in g.matrices]
            params = [p for g in self.groups for b in g.buckets for p in b.params_list]
            self.numbers = sum(p.numel() for p in params)

    rows: dict[str, Any] = {}
    for name, flags in SHORT.items():
        sent.clear()
        look = Look()
        more = f"--train-iters {FEW} --grad-compression-rank {RANK} {flags}"
        run(more.split(), output / f"sums-{name}".replace(" ", "-"), [look])
        rows[name] = {
            "off": look.off,
            "lost": look.lost,
            "bytes": sum(sent),
            "shapes": look.shapes,
            "numbers": look.numbers,
        }
    return rows


def moves(output: Path) -> dict[str, Any]:
    """A running job that changes its layout with compression on, and one stage of two that has
    it."""
    import torch.distributed as dist

    from copus_ext.reshard.inprocess import InProcessResharder
    from copus_ext.reshard.trainer_host import TrainerHost
    from megatron.trainer.common.step_settings import Request
    from megatron.trainer.config.layout import Layout
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Move(Callback):
        def __init__(self) -> None:
            self.result: dict[str, Any] = {}
            self.mover = InProcessResharder()

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            if context.state.iteration == FEW // 2:
                return Request(kind="change", reason="test", move=self.move)
            if context.state.iteration == FEW:
                self.result["last"] = self.rest(context)
            return None

        def rest(self, context: Any) -> float:
            matrices = [m for group in short_groups(context) for m in group.matrices]
            assert matrices
            return sum(m.residual.norm().item() for m in matrices)

        def move(self, job: Any) -> None:
            self.result["before"] = self.rest(job.context)
            outcome = self.mover.move(TrainerHost(job), Layout(tp=2, dp=2), job.state.settings)
            self.result |= {"kind": outcome.kind, "reason": outcome.reason}
            self.result["after"] = self.rest(job.context)

        def on_train_end(self, context: CallbackContext) -> None:
            self.mover.close()

    class Stages(Callback):
        def on_train_start(self, context: CallbackContext) -> None:
            own = [context.groups.pp.rank(), bool(short_groups(context))]
            self.seen: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(self.seen, own)

    move, stages = Move(), Stages()
    flags = f"--train-iters {FEW} --grad-compression-rank {RANK} {ZERO}"
    moved = run(flags.split(), output / "moved", [move])
    some = [*layout_flags(1, 2, 1), "--grad-compression-stages", "1", *flags.split()]
    run(some, output / "stages", [stages])
    losses = [s["losses"]["lm loss"] for s in moved]
    return {**move.result, "losses": losses, "stages": stages.seen}


def main(output: Path) -> Any:
    parts = {"full": full_rank, "measured": measured, "sums": sums, "moves": moves}
    return {name: part(output / name) for name, part in parts.items()}
