"""A script as users of Megatron-LM have one: its own `pretrain`, with data, a model and a loss.

The releases differ in who parses the flags and who builds the model, and are asked for it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
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


def model_of(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """The provider of a model that releases up to 0.18 want."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    args = training.get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    if args.num_experts:
        block: Any = gpt_layer_specs.get_gpt_decoder_block_spec
        layers = block(config, use_transformer_engine=False, vp_stage=vp_stage)
    else:
        layers = gpt_layer_specs.get_gpt_layer_local_spec(normalization=args.normalization)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    mask = mask.reshape(-1)
    total, count = (output.view(-1).float() * mask).sum(), mask.sum().to(torch.int)
    told = torch.cat([total.detach().view(1), count.float().view(1)])
    return total, count, {"lm loss": told}


def forward_step(data_iterator: Any, model: Any) -> Any:
    batch = {name: value.cuda() for name, value in next(data_iterator).items()}
    # What Megatron-LM's own script has the other ranks of a tensor parallel group expect.
    assert len(batch["tokens"]) == training.get_args().micro_batch_size
    inputs = batch["tokens"], batch["position_ids"], batch["attention_mask"]
    output = model(*inputs, labels=batch["labels"])
    return output, functools.partial(loss_of, batch["loss_mask"])


def container() -> Any:
    """All configurations, of the flags, where `pretrain` wants them."""
    args = arguments.parse_and_validate_args(args_defaults={})
    if hasattr(containers, "gpt_config_from_args"):
        model = containers.gpt_config_from_args(args)
        return containers.pretrain_cfg_container_from_args(args, model)
    return containers.pretrain_cfg_container_from_args(args)


if __name__ == "__main__":
    wanted = inspect.signature(training.pretrain).parameters
    given: dict[str, Any] = {
        "train_valid_test_dataset_provider": data_sets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" in wanted:
        given["cfg_container"] = container()
    if wanted["model_provider"].default is inspect.Parameter.empty:
        given["model_provider"] = model_of
    training.pretrain(**given)
