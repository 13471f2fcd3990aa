"""Trains the same run under every layout of four ranks, in the same processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import TINY, TINY_GPT2, evaluations_of, layout_flags, run

SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
UNEVEN = "--micro-batch-size 3 --allow-uneven-micro-batches"
BASES = {
    "llama": TINY,
    "gpt2": TINY_GPT2,
    "llama-bf16": f"{TINY} --bf16",
    # 257 tokens, of which Megatron-LM makes 384, 512 and 512 rows at tensor parallel size 1, 2, 4.
    "llama-bytes": f"{TINY.partition('--pad-vocab')[0]} --vocab-size 256",
}
# The first case of a model is what its others are compared with.
CASES = [
    ("llama", 1, 1, 1, ""),
    ("llama", 1, 1, 1, OVERLAP),
    ("llama", 2, 2, 2, f"{SHARDED} --sequence-parallel"),
    ("llama", 1, 2, 1, f"{OVERLAP} --pipeline-model-parallel-layout E|tt|t|tL"),
    ("llama", 1, 4, 1, "--pipeline-model-parallel-layout E|ttt|t|L"),
    ("llama", 2, 1, 1, f"{UNEVEN} {OVERLAP} --calculate-per-token-loss"),
    ("llama-bytes", 1, 1, 1, ""),
    ("llama-bytes", 2, 1, 1, ""),
    ("gpt2", 1, 1, 1, SHARDED),
    ("gpt2", 2, 2, 1, f"--recompute-activations {SHARDED}"),
    ("gpt2", 1, 2, 2, f"{OVERLAP} {RECOMPUTE}"),
    ("llama-bf16", 1, 1, 1, OVERLAP),
    ("llama-bf16", 2, 2, 1, f"{SHARDED} --sequence-parallel"),
    ("llama", 2, 1, 1, "--sequence-parallel"),
    ("llama", 1, 4, 1, ""),
    ("llama", 2, 2, 1, "--sequence-parallel"),
    ("llama", 1, 2, 2, f"{SHARDED} --overlap-grad-reduce"),
    ("llama", 1, 2, 1, f"{SHARDED} --pipeline-model-parallel-layout Et|tttL"),
    ("llama", 1, 2, 1, OVERLAP),
    ("llama", 1, 2, 1, f"{OVERLAP} --pipeline-model-parallel-layout E|t|t|t|t|L"),
    ("llama", 2, 1, 1, f"{UNEVEN} {SHARDED}"),
    ("llama", 1, 1, 1, f"{UNEVEN} {OVERLAP}"),
    ("gpt2", 4, 1, 1, "--sequence-parallel"),
    ("gpt2", 1, 4, 1, RECOMPUTE),
    ("gpt2", 2, 2, 1, f"{SHARDED} --pipeline-model-parallel-layout Ettt|tL {RECOMPUTE}"),
    ("llama-bf16", 1, 2, 2, f"--no-create-attention-mask-in-dataloader {RECOMPUTE}"),
]
NUM_DAILY = 13
"""Those behind are nightly: their dimensions and flags are, in other company, among the first."""
PIPELINES = [n for n, (_, _, pp, _, more) in enumerate(CASES) if pp > 1 and OVERLAP in more]
"""Cases whose later stages gather weights behind their passes."""
STEPS = 4
EVALUATION = f"--eval-iters 1 --eval-interval {STEPS} --log-params-norm --log-interval 1"


@contextmanager
def gathers_before_messages() -> Iterator[list[int]]:
    """How many gathers of weights this rank starts before its first message between stages, in each
    step and each batch of an evaluation."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    buckets: Any = getattr(param_and_grad_buffer, "_ParamAndGradBucketGroup")  # noqa: B009
    # One is made for every schedule.
    began, sent = P2PCommunicator.__init__, P2PCommunicator._communicate
    gathered = buckets.start_param_sync
    counts: list[int] = []
    counting = False

    def begin(*args: Any, **more: Any) -> None:
        nonlocal counting
        counting = True
        counts.append(0)
        began(*args, **more)

    def communicate(*args: Any, **more: Any) -> Any:
        nonlocal counting
        counting = False
        return sent(*args, **more)

    def start_param_sync(*args: Any, **more: Any) -> None:
        if counting:
            counts[-1] += 1
        gathered(*args, **more)

    with (
        patch.object(P2PCommunicator, "__init__", begin),
        patch.object(P2PCommunicator, "_communicate", communicate),
        patch.object(buckets, "start_param_sync", start_param_sync),
    ):
        yield counts


def early_gathers(number: int, output: Path) -> dict[str, Any]:
    """Of every rank, how many gathers of weights it starts in each step and evaluation before a
    message, and the losses. A run that writes the norm of its weights has them by then."""
    import torch.distributed as dist

    model, tp, pp, vpp, more = CASES[number]
    flags = [*layout_flags(tp, pp, vpp), *more.split(), "--train-iters", str(STEPS)]
    with gathers_before_messages() as counts:
        base = f"{BASES[model]} {EVALUATION.replace('--log-params-norm', '')}"
        steps = run(flags, output / f"early {number}", base=base)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, counts)
    losses = [step["losses"]["lm loss"] for step in steps]
    evaluations = evaluations_of(output / f"early {number}") if steps else []
    return {"gathers": of_all, "losses": losses, "evaluations": evaluations}


def main(output: Path, *words: str) -> Any:
    """Returns losses, gradient norms, early gathers and resources of every case, or of those that
    are not nightly."""
    import psutil

    rows = []
    for number, (model, tp, pp, vpp, more) in enumerate(CASES if words else CASES[:NUM_DAILY]):
        flags = [*layout_flags(tp, pp, vpp), *more.split(), "--train-iters", str(STEPS)]
        base = f"{BASES[model]} {EVALUATION}"
        steps = run(flags, output / str(number), base=base)
        process = psutil.Process()
        rows.append(
            {
                "losses": [step["losses"]["lm loss"] for step in steps],
                "grad_norms": [step["grad_norm"] for step in steps],
                "params_norms": [step["params_norm"] for step in steps],
                "evaluations": evaluations_of(output / str(number)) if steps else [],
                "early": early_gathers(number, output) if number in PIPELINES else None,
                "num_fds": process.num_fds(),
                "num_threads": process.num_threads(),
            }
        )
    return rows
