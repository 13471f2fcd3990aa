"""Trains mixtures of experts under the layouts of four ranks, in the same processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.jobs import MOE, run

MODELS = {
    "plain": f"{MOE} --moe-balance lagged --moe-aux-loss-coeff 1e-2",
    "shared": f"{MOE} --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate "
    "--moe-layer-freq [0]*1+[1]*3 --moe-z-loss-coeff 1e-2 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "bias": f"{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 0.1 --moe-router-topk-scaling-factor 2.5 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
    "--recompute-granularity selective --recompute-modules moe",
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
LAYOUT_CASES = [
    (model, layout) for model in MODELS for layout in (LAYOUTS if model == "plain" else FEW)
]

# The balance loss alone decides these: its weight is large.
HEAVY = f"{MOE} --moe-aux-loss-coeff 10 --clip-grad 0"
BALANCE_LAYOUTS = ("dp4", "ep4", "tp2.ep2.etp1", "pp2.ep2")
PER_TOKEN, UNEVEN = "--calculate-per-token-loss", "--allow-uneven-micro-batches"
BALANCE_CASES = [
    (mode, layout, more)
    for mode in ("lagged", "exact")
    for layout, more in [
        *((layout, "") for layout in BALANCE_LAYOUTS),
        ("dp4", "--micro-batch-size 2"),
        ("dp4", "--micro-batch-size 4"),
        ("tp2.ep2.etp1", "--micro-batch-size 8"),
        ("tp2.ep2.etp1", f"--micro-batch-size 3 {UNEVEN}"),
        ("ep4", PER_TOKEN),
        ("tp2.ep2.etp1", PER_TOKEN),
        ("tp2.ep2.etp1", f"--micro-batch-size 3 {UNEVEN} {PER_TOKEN}"),
    ]
]
CORE_CASES = [
    (kind, layout, more)
    for kind in ("aux_loss", "global_aux_loss")
    for layout, more in (("dp4", ""), ("dp4", "--micro-batch-size 4"), ("tp2.ep2.etp1", ""))
]
"""What megatron-core's own losses do: these differ."""
RESUMED = [("bias", "tp2.ep2.etp1"), ("plain", "pp2.ep2"), ("shared", "ep2")]
SHORT = "--train-iters 3"


def main(output: Path) -> Any:
    """Returns the step records of every run."""
    results: dict[str, list[dict[str, Any]]] = {}

    def record(name: str, flags: str, base: str) -> None:
        folder = output / "".join(c if c.isalnum() else "_" for c in name)
        steps = run(flags.split(), folder, base=f"{base} --log-params-norm --log-interval 1")
        names = ("losses", "grad_norm", "params_norm", "max_expert_load")
        results[name] = [{n: step.get(n) for n in names} for step in steps]

    for model, layout in LAYOUT_CASES:
        record(f"{model} {layout}", f"{LAYOUTS[layout]} {SHORT}", MODELS[model])
    for mode, layout, more in BALANCE_CASES:
        flags = f"{LAYOUTS[layout]} --moe-balance {mode} --global-batch-size 16 {more}"
        record(f"{mode} {layout} {more}", f"{flags} {SHORT}", HEAVY)
    for kind, layout, more in CORE_CASES:
        flags = f"{LAYOUTS[layout]} --moe-router-load-balancing-type {kind} {more}"
        record(f"{kind} {layout} {more}", f"{flags} --global-batch-size 16 {SHORT}", HEAVY)
    for model, layout in RESUMED:
        saved = f"--save {output}/saved-{model} --save-interval 2"
        record(f"{model} saved", f"{SHORT} --use-distributed-optimizer {saved}", MODELS[model])
        load = f"--load {output}/saved-{model} --ckpt-step 2 --use-distributed-optimizer"
        for other in ("dp4", layout):
            record(f"{model} {other} resumed", f"{LAYOUTS[other]} {SHORT} {load}", MODELS[model])
    return results
