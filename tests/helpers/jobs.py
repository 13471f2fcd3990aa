"""Small runs of the trainer: as programs of their own, or inside workers that keep their world."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.helpers.launch import ROOT, Launcher, RanksResult, run_ranks
from tests.helpers.text import text_prefix

TEXT = f"--tokenizer-type NullTokenizer --vocab-size 127 --data-path {text_prefix()}"
"""Real text, and the tokenizer whose numbers it holds."""

TINY = f"""--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
{TEXT} --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 1000
--pad-vocab-for-tensor-parallel-size 4"""


ENDLESS = ["--train-iters", "100000", "--use-distributed-optimizer"]
"""Lengths and optimizer of runs of `TINY` that are stopped; see the fixture `uninterrupted`."""

TINY_GPT2 = f"""--num-layers 4 --hidden-size 32 --num-attention-heads 8 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
{TEXT} --group-query-attention
--num-query-groups 4 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 1000
--pad-vocab-for-tensor-parallel-size 4"""
"""Tied embeddings, learned positions, LayerNorm, GELU, biases, grouped queries."""

LATENT = """--multi-latent-attention --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4
--v-head-dim 6"""
"""Multi-latent attention for `TINY`; its widths divide by four."""
FURTHER = f"{TINY} {LATENT} --q-lora-rank 16 --qk-layernorm --mtp-num-layers 1 --decoupled-lr 5e-3"
"""Multi-latent attention, a further token, and rates of its own for embedding and head."""

EIGHT = """--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24
--moe-token-dispatcher-type alltoall --init-method-std 0.2"""
MOE = f"{TINY} {EIGHT}"
"""A mixture of experts: eight in every layer, two for each token."""


def layout_flags(tp: int, pp: int, vpp: int) -> list[str]:
    flags = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    return flags + (["--num-virtual-stages-per-pipeline-rank", str(vpp)] if vpp > 1 else [])


def train(
    flags: Iterable[str],
    nproc: int,
    run_dir: Path,
    *,
    base: str = TINY,
    launcher: Launcher = "direct",
    timeout_s: float = 480,
) -> RanksResult:
    """Runs `pretrain_gpt.py` on `nproc` ranks with the base flags and these."""
    args = [ROOT / "pretrain_gpt.py", *base.split(), *flags, "--run-dir", run_dir]
    return run_ranks(args, nproc, timeout_s=timeout_s, launcher=launcher)


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The step records of the committed history of a run."""
    from megatron.trainer.logging.metrics import read_metrics

    return [record for record in read_metrics(run_dir) if record["kind"] == "step"]


def losses_of(run_dir: Path) -> list[float]:
    return [step["losses"]["lm loss"] for step in steps_of(run_dir)]


def evaluations_of(run_dir: Path) -> list[float]:
    """The losses of the evaluations of a run, in order."""
    from megatron.trainer.logging.metrics import read_metrics

    records = read_metrics(run_dir)
    return [record["losses"]["lm loss"] for record in records if record["kind"] == "eval"]


def run(
    flags: Iterable[str],
    run_dir: Path,
    callbacks: Iterable[Any] = (),
    *,
    base: str = TINY,
    out: io.StringIO | None = None,
) -> list[dict[str, Any]]:
    """Trains in this process group and returns the step records (rank 0; empty elsewhere); what
    this rank prints goes to `out`."""
    import torch.distributed as dist

    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.train.pretrain import pretrain

    config = resolve(
        parse_args([*base.split(), *flags, "--run-dir", str(run_dir)]), dist.get_world_size()
    )
    with contextlib.redirect_stdout(out or io.StringIO()):
        pretrain(config, callbacks)
    return steps_of(run_dir) if dist.get_rank() == 0 else []


def prepare() -> None:
    """Imports what every worker needs, as fast as `pretrain_gpt.py` does; before anything else."""
    from megatron.trainer.resilience.env_checks import import_core, set_process_defaults

    set_process_defaults()
    import_core()


def join() -> None:
    """Prepares a worker, and joins the world of the launcher on gloo."""
    prepare()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # A group that is left over ends while Python still runs: its threads may want the interpreter.
    atexit.register(gc.collect)
