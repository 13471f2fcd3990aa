"""Megatron-LM's own example scripts: what their shell gives to the program, and what is replaced
so that it runs on CPU ranks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.guest.program import ON_CPU
from tests.helpers.text import text_prefix

Flags = dict[str, list[str]]
"""The values of each flag."""
BATCH = 8
NUM_STEPS = 14
SIZES = f"""--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
--num-query-groups 2 --kv-channels 16 --seq-length 32 --max-position-embeddings 32 --num-experts 4
--moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --q-lora-rank 32
--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
--moe-layer-freq [0]*1+[1]*3 --moe-router-topk 2 --moe-router-num-groups 2
--moe-router-group-topk 1 --make-vocab-size-divisible-by 32 --global-batch-size {BATCH}
--micro-batch-size 1"""
LENGTHS = f"""--train-iters {NUM_STEPS} --lr-decay-iters {NUM_STEPS} --lr-warmup-iters 2
--train-samples {NUM_STEPS * BATCH} --lr-decay-samples {NUM_STEPS * BATCH}
--lr-warmup-samples {2 * BATCH} --lr 2e-3 --min-lr 1e-4 --decoupled-lr 4e-3
--decoupled-min-lr 2e-4 --lr-warmup-init 1e-5 --log-interval 1 --eval-iters 1
--eval-interval 20"""
WITHOUT = {
    "no download": "--vocab-file --merge-file --tokenizer-model",
    "no Transformer Engine": """--moe-grouped-gemm --moe-permute-fusion --apply-layernorm-1p
        --fp8-format --fp8-amax-history-len --fp8-amax-compute-algo --fp8-param-gather
        --transformer-impl --use-flash-attn""",
    "no CUDA profiler": "--profile --profile-step-start --profile-step-end",
}
"""Flags that are taken off, by the reason."""
SHIMS = {
    "torchrun": 'printf "%s\\0" "$@" > "$EXAMPLE_WORDS"',
    "python": 'printf "%s\\0" "$@" > "$EXAMPLE_WORDS"',
    "sbatch": "exec bash",
    "srun": 'while [ "$1" != bash ]; do shift; done; exec "$@"',
}
"""Programs of the scripts: the last one that is called writes down what it is given."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A script of the checkout, how it is started, and what it is changed to."""

    script: str
    ranks: int
    home: str
    """Its first layout."""
    moves: dict[int, tuple[str, int]]
    """Layout and batch after a step."""
    given: tuple[str, ...] = ()
    """What stands behind it on the command line."""
    variables: dict[str, str] = field(default_factory=dict)
    replaced: dict[str, tuple[str | None, str]] = field(default_factory=dict)
    """Further values and why; None takes the flag off."""
    refused: str | None = None
    """Flags of the example that COPUS refuses to act with; empty: those that run have them."""
    instead: dict[str, str | None] = field(default_factory=dict)
    """What is replaced where it acts."""


EXAMPLES = {
    "gpt3": Example(
        script="examples/gpt3/train_gpt3_175b_distributed.sh",
        given=("save", "board", "vocab.json", "merges.txt", "text"),
        ranks=4,
        home="tp2.pp2.dp1",
        replaced={
            "--step-batch-size-schedule": (
                "0:4 1K:8",
                "the script breaks the value into words, which the checkout does not take",
            ),
            "--global-batch-size": (None, "the checkout refuses it beside a schedule"),
            "--lr-decay-iters": ("112", "samples, where a schedule stands alone"),
        },
        moves={3: ("tp1.pp2.dp2", 8), 6: ("tp2.pp1.dp2", 16), 8: ("tp2.pp2.dp1", 8)},
        refused="",
        instead={
            "--step-batch-size-schedule": None,
            "--global-batch-size": str(BATCH),
            "--lr-decay-iters": str(NUM_STEPS),
            # Each layout has other masks.
            "--attention-dropout": "0",
            "--hidden-dropout": "0",
        },
    ),
    "llama3": Example(
        script="examples/llama/train_llama3_8b_h100_fp8.sh",
        given=("save", "board", "tokenizer", "text"),
        ranks=2,
        home="tp1.pp1.dp2",
        moves={3: ("tp2.pp1.dp1", 8), 6: ("tp1.pp2.dp1", 16), 8: ("tp1.pp1.dp2", 8)},
        refused="--fp8-format hybrid",
    ),
    "mixtral": Example(
        script="examples/mixtral/train_mixtral_8x7b_distributed.sh",
        given=("save", "tokenizer", "text"),
        ranks=4,
        home="tp1.pp2.ep2.dp2",
        replaced={"--split": ("95,4,1", "little text")},
        moves={
            3: ("tp1.pp1.ep4.dp4", 8),
            6: ("tp2.pp1.ep2.etp1.dp2", 16),
            8: ("tp1.pp2.ep2.dp2", 8),
        },
    ),
    "deepseek_v3": Example(
        script="examples/megatron_fsdp/sbatch_mfsdp_deepseek_v3.sh",
        # COPUS refuses FSDP; the checkout does so before on CPU.
        variables={"USE_MEGATRON_FSDP": "0", "WANDB": "0"},
        ranks=2,
        home="tp1.pp1.ep2.dp2",
        replaced={
            "--moe-token-dispatcher-type": ("alltoall", "DeepEP needs a GPU"),
            "--moe-flex-dispatcher-backend": (None, "DeepEP needs a GPU"),
            "--recompute-modules": ("moe", "no Transformer Engine"),
            "--moe-router-force-load-balancing": (None, "it routes at random, to measure speed"),
        },
        moves={3: ("tp1.pp2.dp1", 8), 6: ("tp2.pp1.ep2.etp1.dp1", 16), 8: ("tp1.pp1.ep2.dp2", 8)},
    ),
}


def flags_of(words: Iterable[str]) -> Flags:
    """Sorts the words of a command line."""
    found: Flags = {}
    for word in words:
        if re.match(r"--?[a-z]", word):
            found[last := word] = []
        else:
            found[last].append(word)
    return found


def given_flags(checkout: Path, example: Example, folder: Path) -> Flags:
    """What the example's shell puts behind the name of the program."""
    programs, written = folder / "bin", folder / "words"
    programs.mkdir(parents=True)
    for name, text in SHIMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    (folder / "pretrain_gpt.py").symlink_to(checkout / "pretrain_gpt.py")
    env = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "EXAMPLE_WORDS": str(written),
        "MEGATRON_PATH": str(folder),
        "OUTPUT_PATH": str(folder / "output"),
        **example.variables,
    }
    command = ["bash", str(checkout / example.script), *example.given]
    subprocess.run(command, env=env, cwd=folder, check=True, capture_output=True)
    words = written.read_text().rstrip("\0").split("\0")
    return flags_of(words[[Path(word).name for word in words].index("pretrain_gpt.py") + 1 :])


def scaled(example: Example, flags: Flags, folder: Path) -> Flags:
    """The flags that run here; says which are others than the example's, and why."""
    layout = dict(re.findall(r"([a-z]+)(\d+)", example.home))
    ranks = {
        "--tensor-model-parallel-size": layout["tp"],
        "--pipeline-model-parallel-size": layout["pp"],
        "--expert-model-parallel-size": layout.get("ep", "1"),
    }
    here = f"""--data-path {text_prefix()} --data-cache-path {folder / "cache"} --num-workers 0
        --tokenizer-type NullTokenizer --vocab-size 127 --tensorboard-dir {folder / "board"}"""
    replaced: dict[str, tuple[str | None, str]] = {
        **{name: (value, "this machine") for name, value in _pairs(here).items()},
        **{name: (value, "a small model") for name, value in _pairs(SIZES).items()},
        **{name: (value, "a dozen steps") for name, value in _pairs(LENGTHS).items()},
        **{name: (value, f"{example.ranks} ranks") for name, value in ranks.items()},
        **{name: (None, why) for why, names in WITHOUT.items() for name in names.split()},
        **example.replaced,
    }
    result, told = dict(flags), dict[str, list[str]]()
    for name, (value, why) in replaced.items():
        if name in flags and flags[name] != [value]:
            told.setdefault(why, []).append(f"{name} {value}" if value else f"no {name}")
            result = with_others(result, {name: value})
    added = flags_of(ON_CPU.split())
    needed = ("--tokenizer-type", "--vocab-size", "--num-workers", "--eval-interval")
    added |= {name: [str(replaced[name][0])] for name in (*needed, "--data-cache-path")}
    if "--fp16" in flags:  # else all steps are skipped; it still falls in the first ones
        added["--initial-loss-scale"] = [str(1 << 22)]
    told["added"] = [" ".join([name, *v]) for name, v in added.items() if name not in flags]
    for why, names in told.items():
        print(f"  {why}: {', '.join(names)}".replace(str(folder), "FOLDER"), flush=True)
    return result | added


def with_others(flags: Flags, others: dict[str, str | None]) -> Flags:
    """Flags with other values; None takes one off."""
    kept = {name: values for name, values in flags.items() if name not in others}
    return kept | {name: [value] for name, value in others.items() if value is not None}


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))
