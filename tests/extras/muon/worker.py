"""Trains with Muon under several layouts, resumes, moves, and takes its steps by hand."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.trainer.common.errors import UsageError
from tests.distributed import worker_relayout
from tests.distributed.worker_relayout import AFTER, BEFORE
from tests.helpers.jobs import MOE, TINY, TINY_GPT2, layout_flags, run
from tests.helpers.of_extras import of_extra

CONVERT = of_extra("megatron.trainer.extras.convert.convert")
TARGET = of_extra("megatron.trainer.extras.convert.target")
INSPECT_CHECKPOINT = of_extra("megatron.trainer.extras.inspect_checkpoint.command")
STEPS, SAVED = 6, 3
MUON = "--optimizer muon --muon-extra-scale-factor 0.2 --muon-fp32-matmul-prec high"
ZERO = "--use-distributed-optimizer"
TP2, PP2, PP2_VPP2 = (" ".join(layout_flags(*s)) for s in ((2, 1, 1), (1, 2, 1), (1, 2, 2)))
EP2 = "--expert-model-parallel-size 2"
ALONE = "--moe-balance lagged --moe-aux-loss-coeff 0.1"
GQA = "--group-query-attention --num-query-groups"
ONE_GROUP = f"{TINY} {GQA} 1 --muon-no-split-qkv"
RUNS = {
    "dp2": (TINY, ""),
    "dp2 asked to split": (TINY, f"{ZERO} --overlap-grad-reduce --overlap-param-gather"),
    "tp2": (TINY, TP2),
    "tp2 distributed": (TINY, f"{TP2} --muon-tp-mode distributed"),
    "tp2 blockwise": (TINY, f"{TP2} --muon-tp-mode blockwise"),
    "pp2 vpp2": (TINY, PP2_VPP2),
    "cp2": (TINY, "--context-parallel-size 2"),
    "gpt2 dp2": (TINY_GPT2, ""),
    "gpt2 tp2": (TINY_GPT2, TP2),
    "groups dp2": (f"{TINY} {GQA} 2", ""),
    "groups tp2": (f"{TINY} {GQA} 2", TP2),
    "shared dp2": (ONE_GROUP, ""),
    "shared tp2": (ONE_GROUP, TP2),
    "shared tp2 distributed": (ONE_GROUP, f"{TP2} --muon-tp-mode distributed"),
    "moe dp2": (f"{MOE} {ALONE}", ""),
    "moe ep2": (f"{MOE} {ALONE}", EP2),
    "rounded dp2": (TINY, "--muon-fp32-matmul-prec medium"),
    "rounded pp2": (TINY, f"{PP2} --muon-fp32-matmul-prec medium"),
    "bf16 dp2": (TINY, "--bf16"),
    "bf16 pp2": (TINY, f"{PP2} --bf16"),
}
"""Base and flags of every run."""
WEIGHED = ("gpt2 dp2", "moe dp2")
"""Those whose momenta are counted."""
OTHERWISE = "--muon-momentum 0.2 --adam-beta1 0.5 --adam-eps 1e-3"
"""Values of which a checkpoint keeps its own."""
NESTEROV = "--muon-nesterov --muon-scale-mode unit_rms_norm --muon-no-split-qkv"
BY_HAND = {"hand": "", "hand otherwise": NESTEROV}
VARIANTS = {
    "dense": (f"{TINY} {MUON}", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (1, 1, 1)], (1, 2, 1)),
    "shared": (f"{ONE_GROUP} {MUON}", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 1)], (2, 1, 1)),
    "bf16": (f"{TINY} {MUON} --bf16", [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 1)], (1, 2, 1)),
    "moe": (
        f"{MOE} {ALONE} {MUON}",
        ["tp1.pp1.dp2", "tp1.pp1.ep2.dp2", "tp2.pp1.etp1.dp1", "tp1.pp1.dp2"],
        "tp1.pp1.ep2.dp2",
    ),
}
"""As those of `worker_relayout`."""


def main(output: Path, *names: str) -> Any:
    """With names: what `worker_relayout` finds. Else losses and norms of every run, and how far
    weights are from those by hand."""
    if names:
        worker_relayout.VARIANTS.update(VARIANTS)
        found = worker_relayout.main(output, *names)
        return found if "dense" not in names else found | _resumed_and_moved(output)
    rows: dict[str, Any] = {}
    for name, (base, flags) in RUNS.items():
        if name in WEIGHED:
            flags += f" --save {output / 'weighed' / name.split()[0]}"
        rows[name] = _losses(output / name, flags, base=base)
    for name in WEIGHED:
        _, record = _inspected(output / "weighed" / name.split()[0])
        rows[f"{name} momenta"] = record["bytes_by_state"]["momentum_buffer"]
    for name, flags in BY_HAND.items():
        by_hand = _by_hand(flags)
        _losses(output / name, f"{PP2} {flags} --clip-grad 0 --weight-decay 0.1", [by_hand])
        rows[name] = by_hand.off
    save = f"--save {output / 'save'}"
    rows["begun"] = _losses(output / "begun", f"{save} --exit-interval {SAVED}")
    for name, flags in (("resumed", OTHERWISE), ("resumed as pp2", PP2), ("resumed as tp2", TP2)):
        rows[name] = _losses(output / name, f"--load {output / 'save'} {flags}")
    rows["inspected"] = _inspected(output / "save")
    _converted(output)
    converted = output / "converted"
    rows["resumed as converted"] = _losses(output / "resumed c", f"--load {converted} {TP2}")
    return rows | _from_another(output)


def _resumed_and_moved(output: Path) -> dict[str, Any]:
    """What `worker_relayout` finds of a run that is resumed with other values of the flags, and the
    losses of the run as it began."""
    saved, whole = output / "saved", f"--train-iters {BEFORE + AFTER}"
    first = _losses(output / "first", f"{whole} --save {saved} --exit-interval 1")
    whole = _losses(output / "unbroken", whole)
    flags = f"{TINY} {MUON} --load {saved} {OTHERWISE}"
    worker_relayout.VARIANTS["resumed"] = (flags, [(1, 1, 1), (2, 1, 1)], (1, 1, 1))
    found = worker_relayout.main(output, "resumed")
    return {**found, "first": first["losses"], "unbroken": whole["losses"]}


def _inspected(folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and record of `copus inspect-checkpoint --verify`, on every rank."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = INSPECT_CHECKPOINT.main([str(folder), "--verify", "--json"])
    return code, json.loads(out.getvalue())


def _converted(output: Path) -> None:
    """Rank 0 makes one of tensor size 2 of a checkpoint."""
    if dist.get_rank() == 0:
        changes = TARGET.Changes(tp=2, dp=1)
        CONVERT.convert(output / "save", output / "converted", changes, verify=True)
    dist.barrier()


def _from_another(output: Path) -> dict[str, Any]:
    """Runs that go on from a checkpoint of another optimizer: what refuses them, and their losses
    from the weights alone. The first is the run that saved."""
    adam = f"{ZERO} --optimizer adam"
    rows: dict[str, Any] = {}
    rows["adam"] = _losses(output / "adam", f"{adam} --save {output / 'adam'} --exit-interval 3")
    rows["adam whole"] = _losses(output / "adam whole", adam)
    words = f"{adam} --load {output / 'adam'} --adam-beta1 0.5 --adam-eps 1e-3"
    rows["adam resumed"] = _losses(output / "adam resumed", words)
    for name, flags, origin in (
        ("muon after adam", "", "adam"),
        ("adam after muon", adam, "save"),
        ("adam whole after split", "--optimizer adam", "adam"),
    ):
        flags = f"{flags} --load {output / origin}"
        try:
            rows[f"{name} refused"] = _losses(output / f"{name} refused", flags)
        except UsageError as error:
            rows[f"{name} refused"] = str(error)
        rows[name] = _losses(output / name, f"{flags} --no-load-optim")
    return rows


def _losses(
    folder: Path, flags: str, callbacks: Any = (), *, base: str = TINY
) -> dict[str, list[float]]:
    words = [*MUON.split(), "--train-iters", str(STEPS), *flags.split()]
    steps = run(words, folder, callbacks, base=base)
    return {
        "losses": [s["losses"]["lm loss"] for s in steps],
        "grad_norms": [s["grad_norm"] for s in steps],
    }


def _by_hand(flags: str) -> Any:
    import torch

    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class ByHand(Callback):
        """Compares the matrices of layers after each step with those of Muon in fp64."""

        def __init__(self) -> None:
            self.before: dict[str, tuple[Any, Any, float]] = {}
            self.momenta: dict[str, Any] = {}
            self.off: list[float] = []

        def on_grads_ready(self, context: CallbackContext) -> None:
            (group,) = (g for g in context.optimizer.param_groups if "momentum" in g)
            for number, chunk in enumerate(context.model):
                for name, p in chunk.named_parameters():
                    if p.dim() == 2 and ".layers." in name:
                        grad = p.main_grad.double().clone()
                        self.before[f"{number} {name}"] = p.detach().double(), grad, group["lr"]

        def on_train_step_end(self, context: CallbackContext) -> None:
            for number, chunk in enumerate(context.model):
                for name, p in chunk.named_parameters():
                    if (found := self.before.get(f"{number} {name}")) is None:
                        continue
                    weight, grad, lr = found
                    momentum = self.momenta.get(f"{number} {name}", torch.zeros_like(grad))
                    momentum = 0.9 * momentum + 0.1 * grad
                    self.momenta[f"{number} {name}"] = momentum
                    if "nesterov" in flags:
                        grad = 0.1 * grad + 0.9 * momentum
                    else:
                        grad = momentum
                    update = torch.cat(
                        [orthogonal(part, flags) for part in parts(name, grad, context)]
                    )
                    if "linear_qkv" in name and "no-split" not in flags:
                        update = joined(update, context)
                    new = weight * (1 - 0.1 * lr) - lr * 0.2 * update
                    moved = (new - weight).norm()
                    self.off.append(((p.detach().double() - new).norm() / moved).item())

    def groups(context: CallbackContext) -> tuple[int, int]:
        model = context.config.model
        return model.num_query_groups or model.num_attention_heads, model.kv_channels

    def parts(name: str, grad: Any, context: CallbackContext) -> list[Any]:
        if "linear_qkv" not in name or "no-split" in flags:
            return [grad]
        num, width = groups(context)
        rows = grad.view(num, -1, width, grad.shape[-1])
        split = rows[:, :-2], rows[:, -2:-1], rows[:, -1:]
        return [part.reshape(-1, grad.shape[-1]) for part in split]

    def joined(update: Any, context: CallbackContext) -> Any:
        num, width = groups(context)
        keys = num * width
        queries = len(update) - 2 * keys
        split = update.split([queries, keys, keys])
        rows = [part.view(num, -1, update.shape[-1]) for part in split]
        return torch.cat(rows, dim=1).view(update.shape)

    def orthogonal(matrix: Any, flags: str) -> Any:
        """Five quintic steps from the matrix over its Frobenius norm."""
        x = matrix.mT if len(matrix) > matrix.shape[1] else matrix
        x = x / x.norm()
        for a, b, c in (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.mT if len(matrix) > matrix.shape[1] else x
        rows, columns = matrix.shape
        scale = (rows / columns) ** 0.5 if "unit_rms" in flags else max(rows, columns) ** 0.5
        return scale * x

    return ByHand()
