"""Takes one step of models whose samples several ranks share, or whose logits come in parts, in the
same processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.distributed.worker_relayout import state_of
from tests.helpers.jobs import LATENT, MOE, TINY, TINY_GPT2, run
from tests.helpers.text import lines_prefix

SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
HEADS = "--num-attention-heads 8 --group-query-attention --num-query-groups 4"
MASKED = f"--eod-mask-loss --data-path {lines_prefix()}"
MODELS = {
    "llama": f"{TINY} {HEADS} {MASKED}",
    "per token": f"{TINY} {HEADS} {MASKED} --calculate-per-token-loss",
    "gpt2": TINY_GPT2,
    "latent": f"{TINY} {LATENT} --q-lora-rank 16 --qk-layernorm",
    "moe": f"{MOE} --moe-balance exact --moe-aux-loss-coeff 1 --moe-z-loss-coeff 1e-2",
}
"""Name -> flags. The losses of a sample do not count all its tokens where `MASKED` is."""
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
A2A = "--cp-comm-type a2a"
LAYOUTS = {
    "dp4": "",
    "ep2": "--expert-model-parallel-size 2",
    "cp4": CP4,
    "cp4 a2a": f"{CP4} {A2A} {OVERLAP}",
    "cp2 dp2": f"{CP2} {OVERLAP}",
    "cp2 dp2 a2a": f"{CP2} {A2A} {RECOMPUTE}",
    "tp2 cp2": f"{TP2} {CP2}",
    "tp2 cp2 sp": f"{TP2} {CP2} --sequence-parallel {SHARDED}",
    "tp2 cp2 sp a2a": f"{TP2} {CP2} {A2A} --sequence-parallel",
    "pp2 cp2": f"{PP2} {CP2} {SHARDED}",
    "pp2 vpp2 cp2": f"{PP2} --num-virtual-stages-per-pipeline-rank 2 {CP2} {OVERLAP}",
    "pp2 vpp2 cp2 a2a": f"{PP2} --num-virtual-stages-per-pipeline-rank 2 {CP2} {A2A} {RECOMPUTE}",
    "tp2 sp in parts": f"{TP2} --sequence-parallel --logits-chunks 3 {SHARDED}",
    "pp2 cp2 in parts": f"{PP2} {CP2} --logits-chunks 4",
    "cp2 ep2": f"{CP2} --expert-model-parallel-size 2 {SHARDED}",
    "cp2 ep4": f"{CP2} --expert-model-parallel-size 4",
    "tp2 cp2 ep2 etp1": f"{TP2} {CP2} --expert-model-parallel-size 2 "
    f"--expert-tensor-parallel-size 1 {SHARDED}",
}
"""Name -> flags of the layout, of four ranks."""
EIGHT = {
    "dp8": "",
    "tp2 cp2 pp2 sp": f"{TP2} {CP2} {PP2} --sequence-parallel {SHARDED}",
    "cp4 pp2 vpp2": f"{CP4} {PP2} --num-virtual-stages-per-pipeline-rank 2 {OVERLAP}",
    "tp2 cp4 a2a": f"{TP2} {CP4} {A2A}",
    "cp8 a2a": f"--context-parallel-size 8 {A2A}",
}
"""The same for eight ranks."""
DENSE = tuple(name for name in LAYOUTS if "ep" not in name)
OF_MODEL = {
    "llama": DENSE,
    "per token": ("dp4", "cp4", "tp2 cp2 sp a2a", "pp2 cp2"),
    "gpt2": ("dp4", "cp4", "tp2 cp2", "pp2 vpp2 cp2 a2a", "tp2 sp in parts", "pp2 cp2 in parts"),
    "latent": ("dp4", "cp4", "tp2 cp2 sp", "cp2 dp2 a2a"),
    "moe": ("dp4", "ep2", "cp4", "cp2 ep2", "cp2 ep4", "tp2 cp2 ep2 etp1", "pp2 cp2"),
}
CASES = [(model, layout) for model in MODELS for layout in OF_MODEL[model]]
DAILY = {
    *(f"llama {name}" for name in ("dp4", "cp4", "cp4 a2a", "cp2 dp2", "tp2 cp2 sp a2a")),
    *(f"llama {name}" for name in ("pp2 vpp2 cp2", "pp2 cp2 in parts")),
    *("per token dp4", "per token tp2 cp2 sp a2a"),
    *("gpt2 dp4", "gpt2 tp2 cp2", "gpt2 tp2 sp in parts"),
    *("latent dp4", "latent tp2 cp2 sp"),
    *("moe dp4", "moe cp2 ep2", "moe tp2 cp2 ep2 etp1"),
}
"""The cases of every commit; the others are nightly."""
CASES_OF_EIGHT = [("llama", layout) for layout in EIGHT]
RESUMED = ("cp2 dp2", "tp2 cp2 sp", "pp2 vpp2 cp2", "dp4")
"""Layouts that go on from a checkpoint of the first."""
WRONG = "divided by own tokens"
"""A run with a mistake that the comparison must see."""


class Received:
    """Stands for torch.distributed where samples are shared, and counts what this rank receives."""

    def __init__(self) -> None:
        self.elements = 0

    def all_gather_into_tensor(self, whole: Any, own: Any, **more: Any) -> None:
        import torch.distributed as dist

        self.elements += whole.numel() - own.numel()
        dist.all_gather_into_tensor(whole, own, **more)

    def reduce_scatter_tensor(self, own: Any, whole: Any, **more: Any) -> None:
        import torch.distributed as dist

        self.elements += whole.numel() - own.numel()
        dist.reduce_scatter_tensor(own, whole, **more)

    def all_to_all_single(self, received: Any, sent: Any, *, group: Any) -> None:
        import torch.distributed as dist

        self.elements += received.numel() - received.numel() // group.size()
        dist.all_to_all_single(received, sent, group=group)


Gradients = dict[str, Any]
"""Tensors by the names of whole parameters."""


def first_step(flags: str, folder: Path, *, base: str) -> tuple[float | None, Gradients]:
    """Takes one step.

    Args:
        flags: of the layout, and others.
        folder: of the run.
        base: flags of the model.

    Returns:
        Its loss, on rank 0; and its gradients, but for a factor: the first moments after it.
    """
    from megatron.trainer.common.step_settings import Request
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    gradients: Gradients = {}

    class Look(Callback):
        """Takes the first moments after the step."""

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            return Request(kind="change", reason="test", move=self.look)

        def look(self, job: Any) -> None:
            full, _, _ = state_of(job)
            gradients.update({k: v for k, v in full.items() if k.startswith("exp_avg.")})

    words = f"{flags} --train-iters 1 --clip-grad 0 --weight-decay 0 --log-interval 1".split()
    steps = run(words, folder, [Look()], base=base)
    return (steps[0]["losses"]["lm loss"] if steps else None), gradients


def main(output: Path, *words: str) -> Any:
    """Returns the loss of the first batch, the elements that a rank receives to share samples, and
    how far each gradient is from that of plain data parallelism, over the largest entry of the
    tensor; with the word `eight` those of eight ranks."""
    from megatron.trainer.distributed import context_parallel
    from megatron.trainer.train import step

    def one(model: str, layout: str, name: str) -> tuple[dict[str, Any], Gradients]:
        received = Received()
        with patch.object(context_parallel, "dist", received):
            loss, gradients = first_step(
                (LAYOUTS | EIGHT)[layout], output / name.replace(" ", "_"), base=MODELS[model]
            )
        return {"loss": loss, "received": received.elements}, gradients

    rows: dict[str, dict[str, Any]] = {}
    whole: dict[str, Gradients] = {}
    chosen = [case for case in CASES if "all" in words or " ".join(case) in DAILY]
    for model, layout in CASES_OF_EIGHT if "eight" in words else chosen:
        row, own = one(model, layout, f"{model} {layout}")
        row["distances"] = distances(own, whole.setdefault(model, own))
        rows[f"{model} {layout}"] = row
    if "eight" in words:
        return {"rows": rows}
    loss = step.language_model_loss

    def wrong(mask: Any, output: Any, *, mean_over: Any, **more: Any) -> Any:
        return loss(mask, output, **more)

    with patch.object(step, "language_model_loss", wrong):
        row, own = one("llama", "cp4", WRONG)
    rows[WRONG] = {**row, "distances": distances(own, whole["llama"])}
    return {"rows": rows, "resumed": _resumed(output)}


def _resumed(output: Path) -> dict[str, list[float]]:
    """Losses after a checkpoint, by the layout that went on."""
    base = MODELS["llama"]
    saved, found = output / "saved", {}
    for layout in RESUMED:
        flags = f"{LAYOUTS[layout]} --use-distributed-optimizer --train-iters 4 --log-interval 1"
        if not found:
            first = f"{flags} --save {saved} --save-interval 2"
            steps = run(first.split(), output / "first", base=base)
            found["without a stop"] = [step["losses"]["lm loss"] for step in steps[2:]]
        load = f"{flags} --load {saved} --ckpt-step 2"
        steps = run(load.split(), output / f"resumed {layout}".replace(" ", "_"), base=base)
        found[layout] = [step["losses"]["lm loss"] for step in steps]
    return found


def distances(own: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """Largest difference of each tensor over its largest entry."""
    assert own.keys() == whole.keys(), own.keys() ^ whole.keys()
    return {k: float((own[k] - v).abs().max() / v.abs().max()) for k, v in whole.items()}
