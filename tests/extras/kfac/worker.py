"""Trains with K-FAC under several layouts, resumes, and finds the covariances by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import FURTHER, TINY, TINY_GPT2, layout_flags, run
from tests.helpers.of_extras import of_extra

PHASE_PLAN = of_extra("copus_ext.extras.phase_plan.layouts")
BATCH, STEPS, INTERVAL, SAVED = 8, 7, 3, 4
ZERO = "--use-distributed-optimizer"
PP2 = " ".join(layout_flags(1, 2, 1))
OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
KFAC = f"--kfac --kfac-interval {INTERVAL}"
RUNS = {
    "dp2": (TINY, f"{ZERO} --micro-batch-size 1"),
    "dp2 by four": (TINY, f"{ZERO} --micro-batch-size 4"),
    "dp2 whole": (TINY, "--micro-batch-size 2"),
    "dp2 in buckets": (TINY, f"{ZERO} {OVERLAPPED} --ddp-bucket-size 5000"),
    "dp2 overlapped": (TINY, f"{ZERO} {OVERLAPPED}"),
    "pp2": (TINY, f"{PP2} --micro-batch-size 2"),
    "pp2 recomputed": (TINY, f"{PP2} {RECOMPUTED}"),
    "pp2 vpp2": (TINY, " ".join([*layout_flags(1, 2, 2), ZERO])),
    "cp2": (TINY, f"{ZERO} --context-parallel-size 2"),
    "cp2 per token": (TINY, "--context-parallel-size 2 --calculate-per-token-loss"),
    "gpt2 dp2": (TINY_GPT2, ZERO),
    "gpt2 pp2": (TINY_GPT2, f"{PP2} --micro-batch-size 4"),
    "latent dp2": (FURTHER, ZERO),
    "latent dp2 by two": (FURTHER, "--micro-batch-size 2"),
    # The new layout begins anew where a refresh is due anyway.
    "moved": (TINY, f"{ZERO} --layout-schedule {INTERVAL * BATCH * 32}:tp1.pp2.dp1"),
}
"""Base and flags of every run with K-FAC."""
BY_HAND = {
    "hand": "--micro-batch-size 2",
    "hand sharded": ZERO,
    "hand in buckets": f"{ZERO} {OVERLAPPED} --ddp-bucket-size 5000",
    "hand bf16": f"{ZERO} --bf16",
    "hand reduced in bf16": f"{ZERO} --bf16 --grad-reduce-in-bf16",
}
"""Flags of runs whose first gradients are computed by hand, too."""


def main(output: Path) -> Any:
    """Returns losses and norms of every run, and of what is off by hand."""
    import torch
    import torch.distributed as dist

    from megatron.trainer.extras.kfac.precondition import Factors, Kfac
    from megatron.trainer.train import build
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    make, rows = build.build_features, {}

    class Look(Callback):
        """Compares the first new gradient of every matrix with one by hand."""

        def __init__(self) -> None:
            self.parts: list[Any] = []
            self.before: list[Any] = []
            self.passed: dict[Any, dict[str, Any]] = {}
            self.off: list[float] = []
            self.own = self.matrices = 0
            self.gathered: list[bool] = []

        def count(self, *args: Any, **more: Any) -> Any:
            features = make(*args, **more)
            self.parts = [f for f in features if isinstance(f, Kfac)]
            self.matrices = sum(len(kfac.factors) for kfac in self.parts)
            self.gathered = [s.is_gathered for kfac in self.parts for s in kfac.shared]
            return features

        def build(self, *args: Any, **more: Any) -> Any:
            features = self.count(*args, **more)
            self.passed = {f: {"inputs": [], "outputs": []} for f in self.parts[0].factors}
            return features

        def on_grads_ready(self, context: CallbackContext) -> None:
            if self.before:
                return
            kfac = self.parts[0]
            self.before = [(f, gathered(kfac, f.weight)) for f in kfac.factors]

        def on_train_step_end(self, context: CallbackContext) -> None:
            kfac = self.parts[0]
            if self.off:
                return
            self.own = len(kfac.own)
            for factors, grad in self.before:
                whole = [torch.cat(self.passed[factors][kind]) for kind in ("outputs", "inputs")]
                assert len(whole[0]) == len(whole[1]) > 0
                new = by_hand(grad, *whole)
                got = factors.weight.main_grad.double()
                if factors in kfac.own:
                    self.off.append(((got - new).norm() / new.norm()).item())

    class Names(Callback):
        """Notes the layout of every step, and the steps of new covariances, from 1."""

        def __init__(self) -> None:
            self.of_steps: list[str] = []
            self.refreshed: set[int] = set()

        def note(self, factors: Any) -> None:
            """Covariances are about to be taken."""
            self.refreshed.add(len(self.of_steps))
            begin(factors)

        def on_train_step_start(self, context: CallbackContext) -> None:
            self.of_steps.append(str(context.config.layout))

    def gathered(kfac: Any, weight: Any) -> Any:
        """The whole reduced gradient of a matrix, of which each rank may have a part alone."""
        for shared in kfac.shared:
            if weight in shared:
                data, group = shared.data, shared.group
                shards, whole = data.view(group.size(), -1), torch.empty_like(data)
                dist.all_gather_into_tensor(whole, shards[group.rank()].clone(), group=group)
                begin = weight.main_grad.storage_offset() - data.storage_offset()
                return whole[begin : begin + weight.numel()].view_as(weight).clone()
        return weight.main_grad.clone()

    def by_hand(grad: Any, outputs: Any, inputs: Any) -> Any:
        """B^-1 G A^-1 in 64 bits, over the tokens of all ranks."""
        found = grad.double()
        for values, side in ((outputs, "left"), (inputs, "right")):
            sum_of = values.double().T @ values.double()
            dist.all_reduce(sum_of)
            size = len(sum_of)
            damped = sum_of * size / sum_of.trace() + 0.1 * torch.eye(size, dtype=torch.float64)
            inverse = torch.linalg.inv(damped)
            found = inverse @ found if side == "left" else found @ inverse
        return found * (grad.double().norm() / found.norm())

    add, begin = Factors._add, Factors.begin

    def noting(looks: Look) -> Any:
        def note(self: Any, kind: str, values: Any) -> None:
            if self in looks.passed and not looks.before:
                rows_ = values.detach().reshape(-1, values.shape[-1]).clone()
                looks.passed[self][kind].append(rows_)
            add(self, kind, values)

        return note

    def record(name: str, flags: str, base: str = TINY, *, hand: bool = False) -> None:
        look, names, layouts = Look(), Names(), PHASE_PLAN.PhaseLayouts()
        flags += f" --global-batch-size {BATCH}"
        flags += f" --train-samples {BATCH * STEPS}"
        with (
            patch.object(build, "build_features", look.build if hand else look.count),
            patch.object(Factors, "_add", noting(look) if hand else add),
            patch.object(Factors, "begin", lambda factors: names.note(factors)),
        ):
            folder = output / name.replace(" ", "_")
            steps = run(flags.split(), folder, [names, look if hand else layouts], base=base)
        own = torch.tensor(look.own)
        dist.all_reduce(own)
        rows[name] = {
            "losses": [s["losses"]["lm loss"] for s in steps],
            "grad_norms": [s["grad_norm"] for s in steps],
            "layouts": names.of_steps,
            "refreshed": sorted(names.refreshed),
            "off": look.off,
            "matrices": look.matrices,
            "gathered": look.gathered,
            "own": own.item(),
        }

    for name, (base, flags) in RUNS.items():
        record(name, f"{flags} {KFAC}", base)
    for name, flags in BY_HAND.items():
        # The gradients of the first steps of a text are above the limit of the norm.
        record(name, f"{flags} {KFAC} --clip-grad 0", hand=True)
    early = f"--layout-schedule {(INTERVAL - 1) * BATCH * 32}:tp1.pp2.dp1"
    record("moved early", f"{KFAC} {ZERO} {early}")
    record("off", ZERO)
    record("interval 1", f"{ZERO} --kfac --kfac-interval 1")
    save = f"{KFAC} {ZERO} --save-interval {SAVED} --save"
    record("whole", f"{save} {output / 'whole'}")
    saved = f"{save} {output / 'saved'} --load {output / 'saved'}"
    record("begun", f"{saved} --exit-interval {SAVED}")
    record("resumed", saved)
    return rows
