"""A script as users of Megatron-LM 0.19 have one: its own `pretrain`, with data and a loss."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType

training: Any = importlib.import_module("megatron.training")
utils: Any = importlib.import_module("megatron.training.utils")
arguments: Any = importlib.import_module("megatron.training.arguments")
containers: Any = importlib.import_module("megatron.training.argument_utils")
tokenizers: Any = importlib.import_module("megatron.core.tokenizers.utils.build_tokenizer")


def data_sets(num_samples: Any, vp_stage: int | None = None) -> Any:
    args = training.get_args()
    blend, per_split = utils.get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizers.build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


data_sets.is_distributed = True  # type: ignore[attr-defined]


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    mask = mask.reshape(-1)
    total, count = (output.view(-1).float() * mask).sum(), mask.sum().to(torch.int)
    told = torch.cat([total.detach().view(1), count.float().view(1)])
    return total, count, {"lm loss": told}


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    inputs = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    output = model(*inputs, labels=batch["labels"])
    return output, functools.partial(loss_of, batch["loss_mask"])


if __name__ == "__main__":
    args = arguments.parse_and_validate_args(args_defaults={})
    config = containers.pretrain_cfg_container_from_args(
        args, containers.gpt_config_from_args(args)
    )
    training.pretrain(config, data_sets, ModelType.encoder_or_decoder, forward_step)
