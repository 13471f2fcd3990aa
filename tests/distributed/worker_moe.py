"""Trains mixtures of experts under the layouts of four ranks, in the same processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tests.helpers.jobs import EIGHT, LATENT, MOE, TINY_GPT2, run
from tests.helpers.plain_mixture import Losses, PlainMixture

MODELS = {
    "plain": f"{MOE} --moe-balance lagged --moe-aux-loss-coeff 1e-2",
    "shared": f"{MOE} --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate "
    "--moe-balance lagged --moe-aux-loss-coeff 1e-2 --moe-layer-freq [0]*1+[1]*3 "
    "--moe-z-loss-coeff 1e-2 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "bias": f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.1 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
    "--recompute-granularity selective --recompute-modules moe",
    "gpt2": f"{TINY_GPT2} {EIGHT} --moe-balance lagged --moe-aux-loss-coeff 0.1",
    "latent": f"{MOE} {LATENT} --q-lora-rank 16 --qk-layernorm",
    "further": f"{MOE} --mtp-num-layers 1 --moe-balance lagged --moe-aux-loss-coeff 0.1",
}
"""Name -> flags of the model."""
ALLGATHER = "--moe-token-dispatcher-type allgather"
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
LAYOUTS = {
    "dp4": "",
    "ep2": "--expert-model-parallel-size 2",
    "ep4": f"--expert-model-parallel-size 4 {SHARDED}",
    "tp2": "--tensor-model-parallel-size 2",
    "tp2.etp1": f"--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 {OVERLAP}",
    "tp2.ep2.etp1": "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1",
    "tp2.ep4.etp1": "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
    f"--expert-tensor-parallel-size 1 {SHARDED}",
    "tp4.ep4.etp1": "--tensor-model-parallel-size 4 --expert-model-parallel-size 4 "
    "--expert-tensor-parallel-size 1",
    "etp2": f"--expert-tensor-parallel-size 2 {OVERLAP}",
    "pp2": "--pipeline-model-parallel-size 2",
    "pp2.ep2": f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {OVERLAP}",
    "pp2.tp2": "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2",
    "pp2.tp2.ep2": "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
    f"--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 {SHARDED}",
    "pp2.vpp2.ep2": "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    f"--expert-model-parallel-size 2 {OVERLAP}",
    "pp4": "--pipeline-model-parallel-size 4",
    "ep2 gathered": f"--expert-model-parallel-size 2 {ALLGATHER}",
    "tp2.ep2 gathered": "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 "
    f"{ALLGATHER}",
    "ep2.etp2 gathered": "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2 "
    f"{ALLGATHER} {SHARDED}",
}
"""Name -> flags of the layout."""
FEW = ("dp4", "ep2", "tp2.ep4.etp1", "pp2.tp2.ep2", "pp2.vpp2.ep2")
OF_MODEL = {
    **dict.fromkeys(MODELS, FEW),
    "plain": tuple(LAYOUTS),
    "shared": FEW[:1] + FEW[2:],
    "gpt2": ("dp4", "ep2", "tp2.ep4.etp1"),
    "latent": ("dp4", "tp2.ep4.etp1", "pp2.ep2"),
}
LAYOUT_CASES = [(model, layout) for model in MODELS for layout in OF_MODEL[model]]
DAILY = {
    *(f"plain {name}" for name in (*FEW, "etp2", "ep2.etp2 gathered")),
    *(f"{name} dp4" for name in MODELS),
    *("shared pp2.vpp2.ep2", "bias ep2", "bias pp2.tp2.ep2", "gpt2 tp2.ep4.etp1"),
    *("latent pp2.ep2", "further ep2", "further pp2.vpp2.ep2"),
}
"""Model and layout of every commit; the other cases are nightly."""
STEPS = 2

# The balance loss alone decides these: its weight is large. The weights stay as they are, so that
# rounding does not grow from step to step, and there are fractions of an earlier batch.
STILL = f"{MOE} --num-layers 2 --lr 0 --min-lr 0 --clip-grad 0"
HEAVY = f"{STILL} --moe-aux-loss-coeff 10"
EP4, WHOLE = LAYOUTS["ep4"].removesuffix(SHARDED), "--micro-batch-size 8"
TP2, TP4 = LAYOUTS["tp2.ep2.etp1"], LAYOUTS["tp4.ep4.etp1"]
CP2 = "--context-parallel-size 2 --expert-model-parallel-size 2"
PER_TOKEN = "--calculate-per-token-loss"
UNEVEN = "--micro-batch-size 3 --allow-uneven-micro-batches"
BALANCE_CASES = [
    *(
        (mode, flags)
        for mode in ("lagged", "exact")
        for flags in (
            "",
            EP4,
            "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2",
            "--micro-batch-size 2",
            f"{TP2} --micro-batch-size 4",
            f"{TP4} {WHOLE}",
            f"{TP2} {UNEVEN} {PER_TOKEN}",
            f"{CP2} --micro-batch-size 2",
        )
    ),
    ("lagged", TP2),
    ("lagged", f"{TP2} {UNEVEN}"),
    ("lagged", f"{EP4} {PER_TOKEN}"),
]
"""`--moe-balance`, and flags of layout and micro-batches."""
BY_SAMPLE = (
    f"{STILL} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 10 "
    "--moe-z-loss-coeff 1"
)
BY_SAMPLE_CASES = [
    "",
    f"{EP4} --micro-batch-size 2 {PER_TOKEN}",
    f"{TP4} {WHOLE}",
    f"{TP2} {UNEVEN}",
    f"{TP2} {UNEVEN} {PER_TOKEN}",
    f"{CP2} --micro-batch-size 2 {PER_TOKEN}",
]
"""Losses of every sample for itself, and of every token."""
RATE, SCALE = 0.1, 2.5
BIASED = (
    f"{HEAVY} --moe-balance lagged --moe-z-loss-coeff 1 --moe-router-score-function sigmoid "
    f"--moe-router-enable-expert-bias --moe-router-bias-update-rate {RATE} "
    f"--moe-router-topk-scaling-factor {SCALE}"
)
BIASED_CASES = [
    "",
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --micro-batch-size 4",
    f"{TP4} {WHOLE} {PER_TOKEN}",
    f"{TP2} {UNEVEN}",
    f"{CP2} {PER_TOKEN}",
]
"""Both losses beside a bias of the experts, which moves although the weights do not."""
DAILY |= {
    *(f"{mode} {BALANCE_CASES[n][1]}" for mode in ("lagged", "exact") for n in (0, 2, 6, 7)),
    *(f"by sample {BY_SAMPLE_CASES[n]}" for n in (0, 4, 5)),
    *(f"biased {BIASED_CASES[n]}" for n in (0, 1, 4)),
}
# What is neither here nor there, each run makes.
NIGHTLY = {
    *(" ".join(case) for case in (*LAYOUT_CASES, *BALANCE_CASES)),
    *(f"by sample {flags}" for flags in BY_SAMPLE_CASES),
    *(f"biased {flags}" for flags in BIASED_CASES),
} - DAILY
PLAIN = {
    "lagged": (Losses(balance="given", coefficient=10), 2),
    "exact": (Losses(balance="batch", coefficient=10), 2),
    "by sample": (Losses(balance="sample", coefficient=10, z_coefficient=1), 1),
    "biased": (
        Losses(balance="given", coefficient=10, z_coefficient=1, is_sigmoid=True, scale=SCALE),
        2,
    ),
}
"""What the same runs are in plain torch, and over how many steps."""
CORE_CASES = {"aux_loss": ("", "--micro-batch-size 2"), "global_aux_loss": ("", TP2)}
"""What megatron-core's own losses do: these differ."""
RESUMED = {"bias": "tp2.ep2.etp1", "shared": "pp2.ep2"}
"""Models that are saved after the second of three steps, and where they also go on."""


def main(output: Path, *words: str) -> Any:
    results: dict[str, list[dict[str, Any]]] = {}

    seen = Seen()

    def record(name: str, flags: str, base: str, steps: int = STEPS) -> None:
        if not words and name in NIGHTLY:
            return
        folder = output / str(len(results))
        routers = RouterGradients() if base.startswith(STILL) else None
        all_flags = (
            f"{flags} --train-iters {steps} --lr-decay-iters 3 --log-params-norm --log-interval 1"
        )
        callbacks = [routers.callback()] if routers else []
        callbacks += [seen.callback()] if name == "lagged " else []
        found = run(all_flags.split(), folder, callbacks, base=base)
        names = ("losses", "grad_norm", "params_norm", "max_expert_load")
        results[name] = [{n: step.get(n) for n in names} for step in found]
        for step, gradients in zip(results[name], routers.of_steps if routers else ()):
            step["routers"] = gradients

    for model, layout in LAYOUT_CASES:
        save, steps = "", STEPS
        if layout == "dp4" and model in RESUMED:
            save, steps = f"{SHARDED} --save {output}/saved-{model} --save-interval 2", 3
        flags = f"{LAYOUTS[layout]} --micro-batch-size 2 {save}"
        record(f"{model} {layout}", flags, MODELS[model], steps)
    for mode, flags in BALANCE_CASES:
        record(f"{mode} {flags}", f"{flags} --moe-balance {mode}", HEAVY)
    for flags in BY_SAMPLE_CASES:
        record(f"by sample {flags}", flags, BY_SAMPLE, 1)
    for flags in BIASED_CASES:
        record(f"biased {flags}", flags, BIASED)
    for name, (losses, steps) in PLAIN.items():
        results[f"plain {name}"] = in_plain_torch(seen, losses, steps)
    for kind, cases in CORE_CASES.items():
        for flags in cases:
            own = f"{flags} --moe-router-load-balancing-type {kind}"
            record(f"{kind} {flags}", own, HEAVY, 1)
    for model, layout in RESUMED.items():
        load = f"--micro-batch-size 2 --load {output}/saved-{model} --ckpt-step 2 {SHARDED}"
        for other in ("dp4", layout):
            record(f"{model} {other} resumed", f"{LAYOUTS[other]} {load}", MODELS[model], 3)
    evaluating = "--micro-batch-size 2 --eval-iters 1 --eval-interval 1"
    record("evaluated", f"{LAYOUTS['ep2']} {evaluating}", MODELS["bias"])
    exact = "--moe-balance exact --moe-aux-loss-coeff 0.1"
    record("further exact", LAYOUTS["ep2"], f"{MOE} --mtp-num-layers 1 {exact}", 1)
    spoilt = Spoilt()
    run(
        f"{LAYOUTS['ep2']} --train-iters 4".split(),
        output / "spoilt",
        [spoilt.callback()],
        base=f"{MODELS['bias'].partition('--moe-router-load')[0]} --moe-balance lagged "
        "--moe-aux-loss-coeff 0.1",
    )
    return {**results, "spoilt": spoilt.states}


def in_plain_torch(seen: Seen, losses: Losses, steps: int) -> list[dict[str, Any]]:
    """The records of a run whose weights stay as they are, without a trainer."""
    import torch

    model = PlainMixture(seen.weights, losses)
    records, fractions, biases = [], None, None
    for tokens, labels in seen.batches[:steps]:
        record, counts = model.step(tokens, labels, fractions=fractions, biases=biases)
        records.append(record)
        fractions = [c / c.sum() for c in counts.by_score]
        if losses.is_sigmoid:
            biases = [RATE * torch.sign(c.mean() - c) for c in counts.routed]
    return records


class Seen:
    """Notes weights and whole batches of a run in which no dimension of the model is split."""

    def __init__(self) -> None:
        self.weights: dict[str, Any] = {}
        self.batches: list[Any] = []
        """[samples, length] tokens and labels of each step."""

    def callback(self) -> Any:
        """For a run."""
        import torch
        import torch.distributed as dist

        from megatron.trainer.train.callbacks import Callback, CallbackContext

        weights, batches = self.weights, self.batches
        parts: list[torch.Tensor] = []

        def note(_module: Any, args: Any, kwargs: Any) -> None:
            tokens = kwargs.get("input_ids", args[0] if args else None)
            parts.append(torch.stack([tokens, kwargs["labels"]]))

        class Note(Callback):
            def on_train_start(self, context: CallbackContext) -> None:
                bare = context.model[0].module
                weights.update({n: p.detach().clone() for n, p in bare.named_parameters()})
                bare.register_forward_pre_hook(note, with_kwargs=True)

            def on_grads_ready(self, context: CallbackContext) -> None:
                own = torch.cat(parts, dim=1)
                parts.clear()
                everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                dist.all_gather(everyone, own)
                batches.append(torch.cat(everyone, dim=1).unbind())

        return Note()


class RouterGradients:
    """Notes the gradients of all routers when they are reduced: [layers, E, h] of every step."""

    def __init__(self) -> None:
        self.of_steps: list[Any] = []

    def callback(self) -> Any:
        """For a run whose ranks hold whole gradients."""
        import torch
        import torch.distributed as dist

        from megatron.trainer.model.moe import routers_of
        from megatron.trainer.train.callbacks import Callback, CallbackContext

        of_steps = self.of_steps

        class Note(Callback):
            def on_grads_ready(self, context: CallbackContext) -> None:
                held: Any = {n: router.weight for n, router in routers_of(context.model)}
                shape = (5, *next(iter(held.values())).shape)
                sums, ranks = torch.zeros(shape, dtype=torch.float64), torch.zeros(5, 1, 1)
                for layer, weight in held.items():
                    sums[layer], ranks[layer] = weight.main_grad.double(), 1
                dist.all_reduce(sums)
                dist.all_reduce(ranks)
                # Every rank with the layer has the same, or this is nobody's.
                of_steps.append((sums / ranks)[ranks.flatten() > 0].tolist())

        return Note()


class Spoilt:
    """Puts a gradient that is not a number into the second step, and notes fractions and
    biases at the start of every step."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def callback(self) -> Any:
        """For a run."""
        from megatron.trainer.train.callbacks import Callback, CallbackContext

        states = self.states

        class Spoil(Callback):
            def on_train_step_start(self, context: CallbackContext) -> None:
                state = context.state
                states.append([state.expert_fractions, state.expert_biases])

            def on_grads_ready(self, context: CallbackContext) -> None:
                if context.state.iteration == 1:
                    context.model[0].buffers[0].grad_data.fill_(math.nan)

        return Spoil()
