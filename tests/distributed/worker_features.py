"""Trains models with what megatron-core has beside a plain GPT, under every layout of two ranks,
and goes on with each under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.jobs import LATENT, TINY, TINY_GPT2, layout_flags, run

SHARDED = "--use-distributed-optimizer"
# Larger initial weights: every part of the model shows in the loss.
MORE = "--init-method-std 0.2 --log-interval 1 --log-params-norm"
LLAMA, GPT2 = f"{TINY} {MORE}", f"{TINY_GPT2} {MORE}"

MODELS = {
    "llama": (
        LLAMA,
        "--apply-layernorm-1p --rotary-interleaved --rotary-seq-len-interpolation-factor 2 "
        f"--qk-l2-norm --no-rope-freq 2 --decoupled-lr 5e-3 --decoupled-min-lr 1e-3 {SHARDED}",
    ),
    "gpt2": (
        GPT2,
        "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 0.5 "
        "--apply-layernorm-1p --softmax-type off-by-one --init-method-xavier-uniform "
        "--embedding-init-method-std 0.3 --decoupled-lr 5e-3",
    ),
    "latent": (
        LLAMA,
        f"{LATENT} --q-lora-rank 16 --qk-layernorm --rotary-scaling-factor 8 --mscale-all-dim 1 "
        f"--apply-layernorm-1p --apply-wd-to-qk-layernorm {SHARDED}",
    ),
    "further": (
        LLAMA,
        f"{LATENT} --rope-type rope --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 "
        f"--decoupled-lr 5e-3 {SHARDED} --overlap-grad-reduce --overlap-param-gather",
    ),
    "half": (LLAMA, f"--bf16 {LATENT} --q-lora-rank 16 --mtp-num-layers 1 {SHARDED}"),
}
"""Name -> base flags and the flags in question."""

DAILY = ("llama", "latent", "further")
"""The models of every commit."""

LAYOUTS = {"dp": (1, 1, 1), "tp": (2, 1, 1), "pp": (1, 2, 1), "vpp": (1, 2, 2)}
SHARED = ["--sequence-parallel"]
BEFORE, AFTER = 1, 2

ALONE = [
    (LLAMA, "--apply-layernorm-1p"),
    (LLAMA, "--rotary-interleaved"),
    (LLAMA, "--rotary-seq-len-interpolation-factor 2"),
    (LLAMA, "--qk-l2-norm"),
    (LLAMA, "--no-rope-freq 2"),
    (LLAMA, "--decoupled-lr 5e-3"),
    (LLAMA, "--decoupled-lr 1e-3 --decoupled-min-lr 9e-4"),
    (LLAMA, LATENT),
    (LLAMA, f"{LATENT} --rotary-scaling-factor 8"),
    (LLAMA, f"{LATENT} --rotary-scaling-factor 8 --mscale 2"),
    (LLAMA, f"{LATENT} --rotary-scaling-factor 8 --mscale-all-dim 1"),
    (LLAMA, f"{LATENT} --q-lora-rank 16"),
    (LLAMA, f"{LATENT} --q-lora-rank 16 --qk-layernorm"),
    (LLAMA, "--mtp-num-layers 1"),
    (LLAMA, "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5"),
    (LLAMA, "--init-method-xavier-uniform"),
    (LLAMA, "--embedding-init-method-std 0.3"),
    (GPT2, "--quick-geglu"),
    (GPT2, "--quick-geglu --glu-linear-offset 1.0"),
    (GPT2, "--quick-geglu --activation-func-clamp-value 0.5"),
    (GPT2, "--softmax-type off-by-one"),
    (GPT2, "--qk-layernorm --weight-decay 10"),
    (GPT2, "--qk-layernorm --weight-decay 10 --apply-wd-to-qk-layernorm"),
]
"""Base and flags, each one a model or an optimizer of its own."""

SHORT = ["--train-iters", "2", "--global-batch-size", "2"]
SAME = ["--num-distributed-optimizer-instances 2"]
GROUPED = "--microbatch-group-size-per-virtual-pipeline-stage 3"


def main(output: Path, *words: str) -> Any:
    """Returns losses and norms of gradient and weights of every run, or of those of a commit."""

    results: dict[str, list[list[float]]] = {}

    def record(name: str, base: str, flags: list[str]) -> None:
        steps = run(flags, output / name, base=base)
        norms = ("grad_norm", "params_norm")
        results[name] = [[*step["losses"].values(), *(step[n] for n in norms)] for step in steps]

    for model in MODELS if words else DAILY:
        base, more = MODELS[model]
        flags = [*more.split(), "--train-iters", str(BEFORE + AFTER), "--global-batch-size", "4"]
        saved = str(output / f"{model}-saved")
        for layout, sizes in LAYOUTS.items():
            own = [*flags, *layout_flags(*sizes), *(SHARED if layout == "tp" else [])]
            if layout == "dp":
                own += ["--save", saved, "--save-interval", str(BEFORE)]
            record(f"{model}-{layout}", base, own)
            if layout != "dp":
                load = ["--load", saved, "--ckpt-step", str(BEFORE)]
                record(f"{model}-{layout}-resumed", base, [*own, *load])
    for number, (base, more) in enumerate([(LLAMA, ""), (GPT2, ""), *ALONE * bool(words)]):
        record(f"alone-{number}", base, [*more.split(), *SHORT])
    for number, more in enumerate(SAME):
        record(f"same-{number}", LLAMA, [*more.split(), SHARDED, *SHORT])
    interleaved = [*layout_flags(1, 2, 2), "--train-iters", "2"]
    record("grouped", LLAMA, [*interleaved, *GROUPED.split()])
    record("plain", LLAMA, interleaved)
    return results
