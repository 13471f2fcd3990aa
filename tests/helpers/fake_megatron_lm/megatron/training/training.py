"""The loop of a checkout as far as the controller meets it: a real model of megatron-core, its
micro-batch calculator, optimizer and schedule, and the order in which that loop calls them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import transformer_config
from megatron.core.utils import get_model_config as get_model_config
from megatron.training.global_vars import get_args, get_timers


def setup_model_and_optimizer() -> tuple[list[Any], Any, Any]:
    """A small GPT, its optimizer and schedule."""
    args = get_args()
    build: Any = transformer_config.TransformerConfig
    config = build(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    torch.manual_seed(7)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
    )
    chunk = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    settings = OptimizerConfig(
        optimizer="adam", lr=args.lr, adam_beta2=args.adam_beta2, weight_decay=0.1, clip_grad=1.0
    )
    optimizer = get_megatron_optimizer(settings, [chunk])
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = args.lr, args.min_lr
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_samples,
        lr_decay_steps=args.lr_decay_samples,
        lr_decay_style="constant",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=args.train_samples,
        wd_incr_style="constant",
    )
    scheduler.step(increment=args.consumed_train_samples)
    return [chunk], optimizer, scheduler


def train_step(
    forward_step_func: Any, data_iterator: Any, model: Any, optimizer: Any, scheduler: Any, *_: Any
) -> tuple:
    """One step; the seven values of a recent checkout."""
    args = get_args()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=False,
    )
    updated, grad_norm, num_zeros = optimizer.step()
    if updated:
        increment = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        scheduler.step(increment=increment)
    total = torch.stack([x["lm loss"] for x in losses]).mean()
    torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.SUM)
    total /= args.data_parallel_size
    return {"lm loss": total}, int(not updated), False, False, 0, grad_norm, num_zeros


def training_log(
    log: list[Any], loss_dict: Any, batch: int, learning_rate: float, iteration: int
) -> None:
    """Notes a step, and the learning rate it used."""
    log.append([iteration, batch, float(loss_dict["lm loss"]), learning_rate])


def train(
    forward_step_func: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    train_data_iterator: Any,
    valid_data_iterator: Any,
    log: list[Any],
    config: Any,
) -> tuple[int, int]:
    """The loop: samples are counted after the step, and the batch may only grow."""
    args = get_args()
    assert config.no_sync_func is None, "as with --overlap-grad-reduce"
    config.no_sync_func = model[0].no_sync
    get_timers()("interval-time").start()
    iteration = args.iteration
    num_microbatches = get_num_microbatches()
    while iteration < args.train_iters:
        args.curr_iteration = iteration
        update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        if get_num_microbatches() != num_microbatches and iteration != args.iteration:
            assert get_num_microbatches() > num_microbatches, "the batch size may only grow"
        num_microbatches = get_num_microbatches()
        update_num_microbatches(args.consumed_train_samples, consistency_check=True)
        rate = optimizer.param_groups[0]["lr"]
        found = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, None
        )
        iteration += 1
        batch = get_num_microbatches() * args.micro_batch_size * args.data_parallel_size
        args.consumed_train_samples += batch
        training_log(log, found[0], batch, rate, iteration)
    return iteration, 0


def forward_step(read: Any, data_iterator: Any, model: Any) -> tuple:
    """Tokens through the model; the loss of the mean token."""
    tokens = next(data_iterator)
    read.extend(tokens[:, 0].tolist())
    positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
    output = model(tokens[:, :-1] % 100, positions, None, labels=tokens[:, 1:] % 100)
    return output, functools.partial(_loss)


def _loss(output: Any) -> tuple:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}


def get_train_valid_test_num_samples() -> tuple[int, int, int]:
    """Samples of the three data sets."""
    return get_args().train_samples, 0, 0


def build_train_valid_test_datasets(provider: Any) -> Any:
    """The data sets of the script's provider."""
    return provider(get_train_valid_test_num_samples())


def build_train_valid_test_data_iterators(provider: Any) -> tuple[Any, None, None]:
    """Iterators that go on where the arguments stand."""
    build_train_valid_test_datasets(provider)
    return samples(get_args().consumed_train_samples), None, None


def save_checkpoint() -> None:
    """Nothing is saved here."""


def evaluate_and_print_results(prefix: str, data_iterator: Any, model: Any, config: Any) -> None:
    """Nothing is evaluated here."""


def samples(start: int) -> Any:
    """Micro-batches of this replica, one after the other: a sequential sampler."""
    args = get_args()
    rank, size = parallel_state.get_data_parallel_rank(), args.data_parallel_size
    at = start + rank * args.micro_batch_size
    micro = args.micro_batch_size
    while True:
        numbers = range(at, at + micro)
        rows = []
        for number in numbers:
            generator = torch.Generator().manual_seed(number)
            row = torch.randint(0, 100, (args.seq_length + 1,), generator=generator)
            row[0] = number * 100
            rows.append(row)
        yield torch.stack(rows)
        at += micro * size
