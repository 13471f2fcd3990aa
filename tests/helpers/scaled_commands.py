"""Megatron-LM's functional-test commands, made small enough for CPU ranks.

Only sizes, lengths and places are replaced; every other flag stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.launch import ROOT

STEPS = 4
"""Steps of one launch."""
GLOBAL_BATCH_SIZE = 8
_STEPS_OF_BATCH = "--step-batch-size-schedule"
_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_CONTEXT, _LEVELS = "--context-parallel-size", "--hierarchical-context-parallel-sizes"
_EXPERT, _EXPERT_TENSOR = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
_SIZES = {
    "--hidden-size": "64",
    "--ffn-hidden-size": "128",
    "--num-attention-heads": "8",
    "--num-query-groups": "4",
    "--kv-channels": "8",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--vocab-size": "255",
    "--make-vocab-size-divisible-by": "128",
    "--micro-batch-size": "1",
    "--global-batch-size": str(GLOBAL_BATCH_SIZE),
    "--eval-global-batch-size": str(GLOBAL_BATCH_SIZE),
    "--rampup-batch-size": f"4 4 {GLOBAL_BATCH_SIZE}",
    "--eval-iters": "1",
    "--lr": "2e-3",
    "--decoupled-lr": "3e-3",
    "--lr-warmup-samples": "0",
    "--q-lora-rank": "16",
    "--kv-lora-rank": "16",
    "--qk-head-dim": "8",
    "--qk-pos-emb-head-dim": "8",
    "--v-head-dim": "8",
    "--moe-ffn-hidden-size": "64",
}
_LENGTHS = {
    # Flag -> what it counts in, in steps.
    "--train-iters": 1,
    "--lr-decay-iters": 1,
    "--train-samples": GLOBAL_BATCH_SIZE,
    "--lr-decay-samples": GLOBAL_BATCH_SIZE,
}
_DROPPED = (
    "--wandb-project",
    "--wandb-entity",
    "--wandb-exp-name",
    "--wandb-save-dir",
    "--tokenizer-model",
)
"""They need an account, or a file that nobody here has."""
SCALED = frozenset(
    {
        *_SIZES,
        *_LENGTHS,
        *_DROPPED,
        "--num-layers",
        _STEPS_OF_BATCH,
        _TENSOR,
        _CONTEXT,
        _LEVELS,
        _EXPERT,
        _EXPERT_TENSOR,
        "--moe-layer-freq",
        "--moe-token-dispatcher-type",
        "--tokenizer-type",
        "--data-path",
        "--vocab-file",
        "--merge-file",
        "--data-cache-path",
        "--save",
        "--load",
        "--save-interval",
        "--tensorboard-dir",
        "--initial-loss-scale",
    }
)
"""Flags that scaling may touch."""


def read_commands() -> dict[str, list[str]]:
    """Flags of every command as Megatron-LM has them, by the name of its test."""
    text = (ROOT / "scripts" / "docs" / "megatron_lm_flag_sets_0.16.json").read_text(
        encoding="utf-8"
    )
    return {name: flags.split() for name, flags in json.loads(text)["sets"].items()}


def grouped(argv: Sequence[str]) -> dict[str, list[str]]:
    """Flag -> its values, in the order of the command."""
    flags: dict[str, list[str]] = {}
    for word in argv:
        if word.startswith("--"):
            flags[word] = []
        else:
            flags[next(reversed(flags))].append(word)
    return flags


def goes_on(name: str) -> bool:
    """Whether the test of this name stops a run and starts it again."""
    return "_resume_" in name


def launches(name: str, *, world_size: int) -> list[list[str]]:
    """What each launch of a command adds to its flags: where it stops, and under which layout it
    goes on if its test changes that."""
    if not goes_on(name):
        return [[]]
    first = ["--exit-interval", str(STEPS)]
    reshard = re.search(r"_reshard_(\d)x(\d)x", name)
    if reshard is None:
        return [first, []]
    tensor, pipeline = map(int, reshard.groups())
    tensor = min(tensor, world_size // pipeline)
    sizes = {_TENSOR: str(tensor), _PIPELINE: str(pipeline)}
    return [first, [word for pair in sizes.items() for word in pair]]


def scaled(name: str, argv: Sequence[str], folder: Path, *, world_size: int) -> list[str]:
    """The command with small sizes.

    Args:
        name: of its test; where that goes on after a stop, the command is twice as long and saves
            in the middle.
        argv: flags as Megatron-LM has them.
        folder: for what the run writes; `text` in it holds `vocab.json`, `merges.txt` and the data
            set `text_document`.
        world_size: ranks; tensor and then context parallelism shrink until the layout fits.

    Returns:
        Flags for `pretrain_gpt.py`.
    """
    flags = {flag: values for flag, values in grouped(argv).items() if flag not in _DROPPED}
    steps = STEPS * (2 if goes_on(name) else 1)
    new = {flag: value for flag, value in _SIZES.items() if flag in flags}
    new |= {flag: str(unit * steps) for flag, unit in _LENGTHS.items() if flag in flags}
    new |= {
        "--save": str(folder / "saved"),
        "--load": str(folder / "saved"),
        "--data-cache-path": str(folder / "cache"),
        "--tensorboard-dir": str(folder / "tensorboard"),
        "--num-layers": str(_layers(flags)),
        _TENSOR: str(_tensor_parallel(flags, world_size)),
    }
    if _CONTEXT in flags:
        context = _context_parallel(flags, world_size)
        new[_CONTEXT] = str(context)
        new |= {_LEVELS: f"1 {context}"} if _LEVELS in flags else {}
    new |= _of_experts(flags, world_size)
    if "--fp16" in flags:
        # The search for the loss scale begins so high that some twenty steps change no weight.
        new["--initial-loss-scale"] = "1024"
    if goes_on(name):
        new["--save-interval"] = str(STEPS)
    if "--data-path" in flags:
        text = folder / "text"
        new |= {
            "--data-path": str(text / "text_document"),
            "--tokenizer-type": "GPT2BPETokenizer",
            "--vocab-file": str(text / "vocab.json"),
            "--merge-file": str(text / "merges.txt"),
        }
    flags |= {flag: value.split() for flag, value in new.items()}
    if _STEPS_OF_BATCH in flags:
        # One word: from the fourth sample on the batch is the usual one.
        flags[_STEPS_OF_BATCH] = [f"0:4 {4 * int(_SIZES['--seq-length'])}:{GLOBAL_BATCH_SIZE}"]
    return [word for flag, values in flags.items() for word in (flag, *values)]


def _one(flags: Mapping[str, list[str]], flag: str, default: int) -> int:
    return int(flags[flag][0]) if flag in flags else default


def _tensor_parallel(flags: Mapping[str, list[str]], world_size: int) -> int:
    size, others = _one(flags, _TENSOR, 1), _one(flags, _PIPELINE, 1) * _one(flags, _CONTEXT, 1)
    while size * others > world_size and size > 1:
        size //= 2
    return size


def _context_parallel(flags: Mapping[str, list[str]], world_size: int) -> int:
    others = _one(flags, _PIPELINE, 1) * _tensor_parallel(flags, world_size)
    return min(_one(flags, _CONTEXT, 1), world_size // others)


def _of_experts(flags: Mapping[str, list[str]], world_size: int) -> dict[str, str]:
    """Fewer groups of experts, for fewer layers, and a way to them that gloo has."""
    new: dict[str, str] = {}
    tensor = _tensor_parallel(flags, world_size)
    of_experts = min(_one(flags, _EXPERT_TENSOR, tensor), tensor)
    if _EXPERT_TENSOR in flags:
        new[_EXPERT_TENSOR] = str(of_experts)
    if _EXPERT in flags:
        most = world_size // _one(flags, _PIPELINE, 1) // of_experts
        new[_EXPERT] = str(min(_one(flags, _EXPERT, 1), most))
    if "[" in "".join(flags.get("--moe-layer-freq", [])):
        new["--moe-layer-freq"] = f"[0]*1+[1]*{_layers(flags) - 1}"
    if "--moe-token-dispatcher-type" in flags:
        new["--moe-token-dispatcher-type"] = "allgather"
    return new


def _layers(flags: Mapping[str, list[str]]) -> int:
    """Few layers for each chunk of the model, and what uneven ends ask for."""
    stages = _one(flags, _PIPELINE, 1)
    ends = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")
    named = ("--account-for-loss-in-pipeline-split", "--pipeline-model-parallel-layout")
    if any(flag in flags for flag in named):
        return _one(flags, "--num-layers", 0)
    if any(end in flags for end in ends):
        return stages + sum(_one(flags, end, 1) - 1 for end in ends)
    if "--num-layers-per-virtual-pipeline-stage" in flags:
        return 2 * stages * _one(flags, "--num-layers-per-virtual-pipeline-stage", 1)
    return max(4, stages * _one(flags, "--num-virtual-stages-per-pipeline-rank", 1))
