"""Trains in a fake of a Megatron-LM checkout, whose functions are wrapped.

worker_megatron_lm.py OUTPUT_DIR plain|new|shrinking...
worker_megatron_lm.py OUTPUT_DIR ramp_plain|ramp_off|ramp_observed|ramp...

`shrinking` has the default policy, and a first batch far above what it asks for early. Those of a
ramp have `--rampup-batch-size`; `ramp_off` is wrapped but lacks `--copus`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers" / "fake_megatron_lm"), str(ROOT)]
FLAGS = "--copus-policy doubling --copus-max-global-batch-size 32"
SETTINGS = "doubling_first_tokens: 1024\ndoubling_ratio: 2\n"
RAMP_FLAGS = "--copus-policy doubling"
RAMP_SETTINGS = f"{SETTINGS}lr_ramp_steps: 3\n"
RAMP = "4", "4", "64"
RAMP_SIZE = 16


def arguments(output: Path, more: list[str]) -> argparse.Namespace:
    """What that trainer's parser would give."""
    from copus_ext.megatron_lm.host import add_copus_args

    parser = add_copus_args(argparse.ArgumentParser())
    world = int(os.environ["WORLD_SIZE"])
    own: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": None,
        "group_query_attention": False,
        "kv_channels": 8,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "padded_vocab_size": 128,
        "make_vocab_size_divisible_by": 128,
        "vocab_size": 100,
        "swiglu": False,
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": False,
        "hidden_dropout": 0.0,
        "bf16": False,
        "fp16": False,
        "attention_backend": "unfused",
        "transformer_impl": "local",
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "use_distributed_optimizer": False,
        "gradient_accumulation_fusion": False,
        "calculate_per_token_loss": False,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "data_parallel_size": world,
        "rank": int(os.environ["RANK"]),
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "train_samples": 256,
        "train_iters": 32,
        "iteration": 0,
        "consumed_train_samples": 0,
        "num_floating_point_operations_so_far": 0,
        "lr": 1e-3,
        "min_lr": 7e-4,
        "lr_decay_samples": 6400,
        "adam_beta2": 0.9,
        "lr_warmup_samples": 16,
        "lr_warmup_init": 0.0,
        "log_interval": 4,
        "dataloader_type": "single",
        "rampup_batch_size": None,
        "save": str(output),
        "save_interval": 5,
    }
    return argparse.Namespace(**{**vars(parser.parse_args(more)), **own})


def main(output: Path, kinds: list[str]) -> None:
    """Writes batches, losses and samples read, of one run after the other."""
    from tests.helpers.jobs import join

    join()
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.trainer.common.device import use_device

    training: Any = importlib.import_module("megatron.training.training")
    assert "fake_megatron_lm" in str(training.__file__)
    for kind in kinds:
        with use_device("cpu", local_rank=int(os.environ["LOCAL_RANK"])):
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(3)
            record = run(training, output, kind)
            num_microbatches_calculator.destroy_num_microbatches_calculator()
            parallel_state.destroy_model_parallel()
        if dist.get_rank() == 0:
            (output / f"{kind}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


def run(training: Any, output: Path, kind: str) -> dict[str, Any]:
    """Trains, in a folder of its own."""
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator

    from copus_ext.megatron_lm import host as megatron_lm
    from megatron.trainer.config.batch_schedule import make_schedule

    is_ramp = kind.startswith("ramp")
    folder = output / kind
    folder.mkdir(exist_ok=True)
    own = {"shrinking": "", "ramp_observed": "--copus-mode observe"}
    words = own.get(kind)
    if words is None:
        settings = folder / f"{kind}.{os.environ['RANK']}.yaml"
        settings.write_text(RAMP_SETTINGS if is_ramp else SETTINGS)
        words = f"{RAMP_FLAGS if is_ramp else FLAGS} --copus-config {settings}"
    is_off = kind in ("plain", "ramp_plain", "ramp_off")
    args = arguments(folder, [] if is_off else ["--copus", *words.split()])
    if is_ramp:
        args.rampup_batch_size, args.global_batch_size = list(RAMP), RAMP_SIZE
        schedule = make_schedule(
            global_batch_size=RAMP_SIZE, rampup_batch_size=tuple(map(int, RAMP))
        )
        args.train_iters = schedule.iterations_left(0, args.train_samples)
    importlib.import_module("megatron.training.global_vars").set_args(args)
    sizes = args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    as_words: Any = args.rampup_batch_size
    num_microbatches_calculator.init_num_microbatches_calculator(args.rank, as_words, *sizes, False)
    undo = megatron_lm.install(training) if kind not in ("plain", "ramp_plain") else None
    model, optimizer, scheduler = training.setup_model_and_optimizer()
    log: list[Any] = []
    read: list[int] = []
    training.train(
        functools.partial(training.forward_step, read),
        model,
        optimizer,
        scheduler,
        training.build_train_valid_test_data_iterators(lambda sizes: sizes)[0],
        None,
        log,
        model[0].config,
    )
    if undo is not None:
        undo()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, read)
    numbers = sorted(n // 100 for ranks in every for n in ranks)
    return {"log": log, "read": numbers, "consumed": args.consumed_train_samples}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
