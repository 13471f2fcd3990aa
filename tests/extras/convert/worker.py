"""Trains, converts on rank 0, and goes on from the conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.jobs import MOE, TINY, TINY_GPT2, layout_flags, run

BEFORE, AFTER = 2, 2
LENGTH = ["--train-iters", str(BEFORE + AFTER), "--global-batch-size", "2"]
DISTRIBUTED, BF16 = "--use-distributed-optimizer", "--bf16"


@dataclass(frozen=True, kw_only=True)
class Case:
    base: str
    """Flags of the model."""
    common: tuple[str, ...]
    """Flags of all runs."""
    saved: tuple[str, ...]
    """Flags of the run that saves."""
    wish: dict[str, Any]
    """What the conversion changes."""
    direct: tuple[str, ...]
    """Flags to go on from the saved file itself."""
    converted: tuple[str, ...]
    """Flags to go on from the conversion."""


def layout(tp: int, pp: int = 1, vpp: int = 1) -> tuple[str, ...]:
    return tuple(layout_flags(tp, pp, vpp))


EXPERTS = "--expert-model-parallel-size", "2"
WHOLE_EXPERTS = (*layout(2), *EXPERTS, "--expert-tensor-parallel-size", "1")
BIASED = f"""{MOE} --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 0.1 --moe-aux-loss-coeff 0.1 --moe-balance lagged"""
SHARED = f"""{MOE} --moe-layer-freq [0]*2+[1]*2 --moe-shared-expert-intermediate-size 16
--moe-shared-expert-gate"""


CASES = {
    "layout": Case(
        base=TINY_GPT2,
        common=(BF16, DISTRIBUTED),
        saved=layout(2),
        wish={"tp": 1, "pp": 2, "vpp": 2, "dp": 1},
        direct=layout(1, 2, 2),
        converted=layout(1, 2, 2),
    ),
    "to_distributed": Case(
        base=TINY,
        common=(BF16,),
        saved=layout(2),
        wish={"tp": 1, "dp": 2, "optimizer": "distributed"},
        direct=layout(1),
        converted=(*layout(1), DISTRIBUTED),
    ),
    "to_plain": Case(
        base=TINY_GPT2,
        common=(BF16,),
        saved=(*layout(1, 2), DISTRIBUTED),
        wish={"tp": 2, "pp": 1, "optimizer": "plain"},
        direct=(*layout(2), DISTRIBUTED),
        converted=layout(2),
    ),
    "fp32": Case(
        base=TINY,
        common=(),
        saved=layout(1),
        wish={"tp": 2, "dp": 1, "optimizer": "distributed"},
        direct=layout(2),
        converted=(*layout(2), DISTRIBUTED),
    ),
    "fp32_to_plain": Case(
        base=TINY_GPT2,
        common=(),
        saved=(*layout(1, 2), DISTRIBUTED),
        wish={"tp": 2, "pp": 1, "optimizer": "plain"},
        direct=(*layout(2), DISTRIBUTED),
        converted=layout(2),
    ),
    "vocab": Case(
        base=TINY,
        common=(BF16, DISTRIBUTED),
        saved=layout(2),
        wish={"vocab": 128},
        direct=layout(2),
        converted=layout(2),
    ),
    # Two ranks of the distributed optimizer, cut anywhere: rectangles of layers, two files a key.
    "vocab_dp": Case(
        base=TINY,
        common=(BF16, DISTRIBUTED),
        saved=layout(1),
        wish={"vocab": 128},
        direct=layout(1),
        converted=layout(2),
    ),
    # The trainer carries fractions and biases of experts on.
    "mixture": Case(
        base=BIASED,
        common=(),
        saved=EXPERTS,
        wish={"tp": 2, "etp": 1, "dp": 1, "optimizer": "distributed"},
        direct=WHOLE_EXPERTS,
        converted=(*WHOLE_EXPERTS, DISTRIBUTED),
    ),
    # A stage with experts and one without.
    "mixture_in_part": Case(
        base=SHARED,
        common=(BF16,),
        saved=layout(1),
        wish={"tp": 1, "pp": 2, "dp": 1, "optimizer": "distributed"},
        direct=layout(1, 2),
        converted=(*layout(1, 2), DISTRIBUTED),
    ),
    "dtype": Case(
        base=TINY,
        common=(DISTRIBUTED,),
        saved=(*layout(2), BF16),
        wish={"dtype": "fp32"},
        direct=(*layout(2), BF16),
        converted=layout(2),
    ),
}


def convert_on_rank_zero(source: Path, destination: Path, wish: dict[str, Any]) -> None:
    import torch.distributed as dist

    from megatron.trainer.extras.convert.convert import convert
    from megatron.trainer.extras.convert.target import Changes

    if dist.get_rank() == 0:
        convert(source, destination, Changes(**wish), verify=True)
    dist.barrier()


def go_on(output: Path, name: str, case: Case) -> dict[str, list[float]]:
    """The losses after the saved file and after its conversion."""
    flags = [*case.common, *LENGTH]
    saved, converted = output / name, output / f"converted-{name}"
    stop = ["--save", str(saved), "--exit-interval", str(BEFORE)]
    run([*flags, *case.saved, *stop], output / f"run-{name}", base=case.base)
    convert_on_rank_zero(saved, converted, case.wish)
    losses = {}
    for kind, load, more in (
        ("direct", saved, case.direct),
        ("converted", converted, case.converted),
    ):
        run_dir = output / f"run-{name}-{kind}"
        steps = run([*flags, *more, "--load", str(load)], run_dir, base=case.base)
        losses[kind] = [step["losses"]["lm loss"] for step in steps]
    return losses


def main(output: Path) -> Any:
    return {name: go_on(output, name, case) for name, case in CASES.items()}
