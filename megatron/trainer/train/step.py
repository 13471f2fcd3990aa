"""One optimizer step: forward and backward over the micro-batches, reduce, clip, update."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper, roll_tensor

from megatron.trainer.common.collectives import gather_numbers
from megatron.trainer.common.core_version import since
from megatron.trainer.common.signals import StopReason
from megatron.trainer.common.step_settings import StepInfo, learning_rate
from megatron.trainer.config.layout_rules import group_of_microbatches
from megatron.trainer.distributed.context_parallel import local_tokens
from megatron.trainer.distributed.process_groups import seed_step
from megatron.trainer.model.moe import Balance, ExpertLoad, set_counting
from megatron.trainer.optim.optimizer import StepResult, optimizer_step
from megatron.trainer.train.job import Job
from megatron.trainer.train.step_feature import Schedule

Batch = dict[str, torch.Tensor]
_FURTHER = "further losses"


def language_model_loss(
    loss_mask: torch.Tensor | None,
    output: torch.Tensor,
    *,
    weight: float = 1.0,
    mean_over: Any = None,
) -> tuple:
    """The loss of one micro-batch, in one of megatron-core's two forms.

    Args:
        loss_mask: 1 for each token that counts, [micro batch, seq].
        output: loss of each token, [micro batch, seq], fp32 or half precision.
        weight: of this micro-batch in the gradient, over that of one of average size.
        mean_over: group of the ranks that share the samples, where the mean over a micro-batch is
            wanted; megatron-core would take it over the tokens of this rank.

    Returns:
        Sum of the losses that count, their number (int), and `{"lm loss": [sum, number]}` to
        report. With `mean_over` the sum is divided by the number of all ranks and stands for both.
    """
    assert loss_mask is not None
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.float().reshape(-1) * mask)
    num_tokens = mask.sum()
    report = torch.stack([total.detach(), num_tokens])
    # An infinite loss may have a finite gradient: as NaN it reaches every rank with the reduce, and
    # all skip the step. A factor of 1 changes no bit.
    total = total * torch.where(total.detach().isfinite(), 1.0, math.nan)
    if weight != 1.0:
        total = total * weight
    if mean_over is not None:
        shared = num_tokens.clone()
        dist.all_reduce(shared, group=mean_over)
        return total / shared.clamp(min=1), {"lm loss": report}
    return total, num_tokens.to(torch.int), {"lm loss": report}


@dataclass(frozen=True, kw_only=True)
class StepSummary:
    """What all ranks know after a batch."""

    loss: float
    """Sum of the losses of all replicas, in nats."""
    num_tokens: float
    """Tokens counted."""
    further_losses: tuple[float, ...]
    """Mean loss of each further token of `--mtp-num-layers` over all that count, in nats."""
    elapsed_s: float
    """Seconds of the slowest rank."""
    end_s: float | None
    """Of them, those after the last backward pass of all ranks; None of other batches."""
    stop: StopReason | None
    """Why all of them leave."""
    save: bool
    """Whether all of them save."""


def forward_step(
    job: Job, mean_samples: float | None, batches: Iterator[Batch] | None, chunk: Any
) -> tuple:
    """Runs one chunk on one micro-batch, as the schedules call it.

    Args:
        job: says where the batch is put.
        mean_samples: mean samples of a micro-batch where they differ and megatron-core would give
            each the same weight; else None.
        batches: micro-batches in order, or None on a stage that needs none.

    Returns:
        The chunk's output and the function that turns it into a loss.
    """
    job.watchdog.beat()
    with job.trace.span("data"):
        batch = {} if batches is None else local_tokens(next(batches), job.groups.cp)
        device = job.device.torch_device
        batch = {name: t.to(device, non_blocking=True) for name, t in batch.items()}
    mask = batch.get("loss_mask")
    output = chunk(
        batch.get("tokens"),
        batch.get("position_ids"),
        None,
        labels=batch.get("labels"),
        loss_mask=mask,
    )
    config = job.config
    is_shared = config.layout.cp > 1 and not config.batch.calculate_per_token_loss
    group = job.groups.cp if is_shared else None
    loss = functools.partial(language_model_loss, mask, mean_over=group)
    if mean_samples is not None:
        loss = functools.partial(loss, weight=len(batch["tokens"]) / mean_samples)
    if (further := _take_further_losses(mask, job.groups.cp)) is None:
        return output, loss

    def loss_and_further(output: torch.Tensor) -> tuple:
        *found, report = loss(output)
        return *found, {**report, _FURTHER: further}

    return output, loss_and_further


def _take_further_losses(mask: torch.Tensor | None, cp: Any) -> torch.Tensor | None:
    """The losses of further tokens of the micro-batch that a chunk has just trained on.
    megatron-core keeps their means; those of several micro-batches have other weights.

    Args:
        mask: 1 for each token that counts, [micro batch, seq]; of this rank's part of the samples.
        cp: group of the ranks that share the samples.

    Returns:
        [n, 2] sum of the losses that count and their number, for each further token, fp32; None
        where the chunk has none.
    """
    means = MTPLossLoggingHelper.tracker.get("loss_values" if since("0.19") else "values")
    MTPLossLoggingHelper.tracker.clear()
    if means is None or mask is None:
        return None
    counts = []
    for _ in means:
        # As megatron-core moves labels and mask on for each further token.
        mask, count = roll_tensor(mask, shifts=-1, dims=-1, cp_group=cp)
        counts.append(count.float())
    counts = torch.stack(counts)
    # The mean over no token is none.
    return torch.stack([torch.where(counts > 0, means * counts, 0.0), counts], dim=1)


def run_schedule(
    job: Job,
    batches: Iterator[Batch] | None,
    num_microbatches: int,
    *,
    micro_batch_size: int,
    forward_only: bool,
    mean_samples: float | None = None,
) -> torch.Tensor | None:
    """Runs megatron-core's pipeline schedule once.

    Args:
        batches: this replica's micro-batches, or None on a middle stage.
        mean_samples: see `forward_step`.

    Returns:
        [num_microbatches, 1 + n, 2]: sum of the losses and number of tokens of each micro-batch of
        this replica that this rank holds, and the same of each of the n further tokens that it
        trains on, fp32; None on all but the last stage.
    """
    # At most one chunk of a rank holds the first or last stage of a pipeline of two or more ranks.
    iterators: list[Any] = [
        batches if chunk.pre_process or chunk.post_process else None
        for chunk in job.model.unwrapped
    ]
    layout = job.config.layout
    if layout.vpp > 1:
        asked = job.config.parallel.microbatch_group_size_per_vp_stage
        group = group_of_microbatches(layout, num_microbatches, asked)
        job.model.core_config.microbatch_group_size_per_vp_stage = group
    messages: dict[str, Any] = {}
    if layout.pp > 1:
        link = P2PCommunicator(job.groups.pp, job.model.core_config)
        messages = {"p2p_communicator": link, "pg_collection": job.groups}
    schedule = Schedule(
        num_microbatches=num_microbatches,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        is_exact=forward_only or job.context.needs_exact_step,
    )
    for feature in job.features:
        messages |= feature.begin_schedule(job, schedule)
    job.model.gather_ahead(forward_only=forward_only)
    with job.trace.span("forward" if forward_only else "forward and backward"):
        reports = get_forward_backward_func()(
            forward_step_func=functools.partial(forward_step, job, mean_samples),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=job.model.chunks,
            num_microbatches=num_microbatches,
            seq_length=job.seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            **messages,
        )
    if not reports:
        return None
    return torch.stack(
        [torch.stack([r["lm loss"], *r.get(_FURTHER, torch.empty(0, 2))]) for r in reports]
    )


def share_numbers(
    job: Job,
    losses: torch.Tensor | None,
    *,
    iteration: int,
    elapsed_s: float | None = None,
    num_further: int = 0,
) -> StepSummary:
    """Gives every rank the losses, what any rank asks for, and the time of the slowest. One small
    all-gather over the world.

    Args:
        losses: of this replica, from `run_schedule`.
        num_further: further tokens whose losses are among `losses`.
        elapsed_s: seconds of the training step so far on this rank; None for other batches.
    """
    services = job.services
    stop = services.local_stop(iteration)
    own_s = 0.0 if elapsed_s is None else job.model.clock.own_s()
    numbers = [stop.code if stop else 0, services.control.save_asked(), elapsed_s or 0.0, own_s]
    device = job.device.torch_device
    sums = torch.zeros(2 + 2 * num_further, dtype=torch.float64, device=device)
    if losses is not None and job.groups.tp.rank() == 0:
        sums = losses.double().sum(dim=0)[: 1 + num_further].flatten()
    # To a GPU in one piece, for which the host does not wait; it would for each number alone.
    own = torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)
    with job.trace.span("numbers of all ranks"):
        rows = gather_numbers(torch.cat([own, sums]), iteration=iteration)
    if elapsed_s is not None:
        job.rank_times.add(rows[:, 3])
    code, save, seconds, slowest_own_s = rows[:, :4].max(dim=0).values.tolist()
    total, tokens, *further = rows[:, 4:].sum(dim=0).tolist()
    return StepSummary(
        loss=total,
        num_tokens=tokens,
        further_losses=tuple(map(_mean, further[::2], further[1::2])),
        elapsed_s=seconds,
        end_s=seconds - slowest_own_s if slowest_own_s else None,
        stop=StopReason.from_code(int(code)),
        save=bool(save),
    )


def train_step(job: Job) -> tuple[StepInfo, StepSummary]:
    """Takes one step from `state.consumed_samples` and counts it. All ranks take part.

    Returns:
        The step, and what the ranks agree to do after it.
    """
    started = time.monotonic()
    job.model.clock.start(job.trace)
    config, state = job.config, job.state
    mbs = job.micro_batch_size
    global_batch_size, counted_samples = job.global_batch_size, job.counted_samples
    sizes = job.micro_batch_sizes
    seed_step(config.runtime.seed, state.consumed_samples, job.groups)
    balance = job.balance
    if balance is not None:
        prepare_routers(job, balance, sizes)
    batches = _local_batches(job)
    for chunk in job.model.chunks:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    mean_samples = mean_samples_of(job, sizes)
    tokens: list[float] = []
    losses = run_schedule(
        job,
        None if batches is None else _counted(batches, tokens),
        len(sizes),
        micro_batch_size=mbs,
        forward_only=False,
        mean_samples=mean_samples,
    )
    job.fire("on_grads_ready", microbatch_tokens=None if losses is None else tokens)
    result = _update(job)
    sums = None if balance is None else _expert_sums(job, balance)
    if result.updated:
        job.scheduler.step(increment=counted_samples)
        if state.settings.changes_rates:
            job.set_rates()
    _wait_for_kernels(job)
    load = None
    if balance is not None and sums is not None:
        load = _count_experts(job, balance, sums, updated=result.updated)
    shared = share_numbers(
        job,
        losses,
        iteration=state.iteration + 1,
        elapsed_s=time.monotonic() - started,
        num_further=config.model.mtp_num_layers or 0,
    )
    loss = _mean(shared.loss, shared.num_tokens)
    state.advance(
        samples=counted_samples,
        updated=result.updated,
        finite_loss=math.isfinite(loss),
        flops=job.flops_per_sample * global_batch_size,
    )
    info = StepInfo(
        iteration=state.iteration,
        consumed_samples=state.consumed_samples,
        global_batch_size=global_batch_size,
        micro_batch_size=mbs,
        num_microbatches=len(sizes),
        loss=loss,
        grad_norm=result.grad_norm,
        num_zeros=result.num_zeros,
        learning_rate=learning_rate(job.optimizer),
        updated=result.updated,
        elapsed_s=shared.elapsed_s,
        end_s=shared.end_s,
        seq_length=job.seq_length,
        length_ratio=config.segment.ratio,
        further_losses=shared.further_losses,
        load_balancing_loss=load and statistics.fmean(load.balance_losses),
        max_expert_load=load and max(load.max_over_mean),
    )
    for feature in job.features:
        feature.after_step(job, info)
    job.watchdog.step(info.iteration, info.elapsed_s)
    interval = config.runtime.manual_gc and config.runtime.manual_gc_interval
    if interval and state.iteration % interval == 0:
        gc.collect()
    return info, shared


def _mean(total: float, count: float) -> float:
    """NaN of nothing."""
    return total / count if count else math.nan


def _update(job: Job) -> StepResult:
    """Lets the optimizer use the reduced gradients. All ranks take part."""
    for feature in job.features:
        feature.before_optimizer(job)
    _empty_cache(job, level=1)
    with job.trace.span("optimizer"):
        result = optimizer_step(job.optimizer)
    _empty_cache(job, level=2)
    return result


def prepare_routers(job: Job, balance: Balance, sizes: Sequence[int]) -> None:
    """Gives the routers of this rank what the next step needs. All ranks take part.

    Args:
        job: before the step, its random streams seeded for it.
        sizes: samples of every micro-batch of a replica.
    """
    chunks, state, seq_length = job.model.chunks, job.state, job.seq_length
    mean_tokens, fractions = sum(sizes) / len(sizes) * seq_length, None
    if balance.mode == "exact":
        # A first pass only counts; it draws the random numbers of the second.
        set_counting(chunks, True)
        balance.prepare(chunks, state, mean_tokens=mean_tokens)
        with torch.no_grad():
            run_schedule(
                job,
                _local_batches(job),
                len(sizes),
                micro_batch_size=job.micro_batch_size,
                forward_only=True,
            )
        set_counting(chunks, False)
        sums = balance.counted(chunks, job.device.torch_device)
        _wait_for_kernels(job)
        fractions = balance.fractions_of(sums)
        seed_step(job.config.runtime.seed, state.consumed_samples, job.groups)
    balance.prepare(chunks, state, mean_tokens=mean_tokens, fractions=fractions)


def _expert_sums(job: Job, balance: Balance) -> torch.Tensor:
    """What the routers of all ranks chose in a step, as `Balance.counted`."""
    with job.trace.span("expert load"):
        return balance.counted(job.model.chunks, job.device.torch_device)


def _count_experts(job: Job, balance: Balance, sums: torch.Tensor, *, updated: bool) -> ExpertLoad:
    """Moves on what the routers know, by sums that are there."""
    if updated:
        balance.advance(job.state, sums, global_batch_size=job.counted_samples)
        balance.give_biases(job.model.chunks, job.state)
    return balance.load(sums)


def mean_samples_of(job: Job, sizes: Sequence[int]) -> float | None:
    """Mean samples of a micro-batch of the next step, where megatron-core's mean over micro-batches
    would give their samples other weights; else None.

    Args:
        job: before the step.
        sizes: samples of every micro-batch of a replica.
    """
    if job.config.batch.calculate_per_token_loss:
        return None
    if job.is_filled_up:  # masked samples count for nothing, and the others for all
        return job.global_batch_size / (job.config.layout.dp * len(sizes))
    return None if sizes[0] == sizes[-1] else sum(sizes) / len(sizes)


def _local_batches(job: Job) -> Iterator[Batch] | None:
    """This replica's micro-batches of the next step; None on a middle stage."""
    if not job.needs_data:
        return None
    where = {"dp_rank": job.groups.dp.rank(), "dp_size": job.config.layout.dp}
    first = job.config.segment.sample_at(job.state.consumed_samples)
    if job.is_filled_up:
        return job.train_data.read_evaluation(
            num_samples=job.global_batch_size,
            start=first,
            micro_batch_size=job.micro_batch_size,
            min_multiple=job.num_filled_up,
            **where,
        )
    return job.train_data.read(
        consumed_samples=first,
        global_batch_size=job.global_batch_size,
        micro_batch_size=job.micro_batch_size,
        uneven=job.config.batch.allow_uneven_micro_batches,
        block=next((f.sample_block for f in job.features if f.sample_block), None),
        **where,
    )


def _counted(batches: Iterator[Batch], tokens: list[float]) -> Iterator[Batch]:
    """Notes the loss tokens of each micro-batch while the host has them: on a GPU it would have to
    wait for them."""
    for batch in batches:
        tokens.append(batch["loss_mask"].sum().item())
        yield batch


def _wait_for_kernels(job: Job) -> None:
    """Lets a step's time hold its kernels, and numbers arrive that were sent to the host."""
    if job.device.is_cuda:
        torch.cuda.synchronize()


def _empty_cache(job: Job, *, level: int) -> None:
    """Returns unused memory to the GPU if `--empty-unused-memory-level` is at least `level`."""
    if job.device.is_cuda and job.config.runtime.empty_unused_memory_level >= level:
        torch.cuda.empty_cache()
