"""From finished steps to the log line, the record and the sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.trainer.common.program import print_line
from megatron.trainer.common.signals import StopReason
from megatron.trainer.common.step_settings import StepInfo
from megatron.trainer.logging.log_line import StepReport, training_line, validation_lines
from megatron.trainer.train.job import Job


def is_last_rank() -> bool:
    """Whether this rank prints, as Megatron-LM's last rank does."""
    return dist.get_rank() == dist.get_world_size() - 1


@torch.no_grad()
def parameter_norm(job: Job) -> float:
    """L2 norm of all weights, each counted once. Collective over the world."""
    total, experts = torch.zeros(2, dtype=torch.float32, device=job.device.torch_device).unbind()
    for chunk in job.model.chunks:
        if chunk.ddp_config.overlap_param_gather:
            # Else the other ranks' updates only come with the next forward pass.
            chunk.start_param_sync(force_sync=True)
        for param in chunk.parameters():
            if not getattr(param, "allreduce", True):
                experts += param.detach().float().square().sum()
            elif param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param):
                total += param.detach().float().square().sum()
    dist.all_reduce(total, group=job.groups.mp)
    if job.balance is not None:
        dist.all_reduce(experts, group=job.groups.tp_ep_pp)
    return math.sqrt(total.item() + experts.item())


@dataclass
class _Interval:
    losses: list[dict[str, float]] = field(default_factory=list)
    """Losses by name of the steps that updated the weights."""
    steps: int = 0
    flops: float = 0.0
    skipped: int = 0
    """Steps without an update."""
    nan: int = 0
    """Steps with a loss that is not finite."""
    elapsed_s: float = 0.0

    def add(self, info: StepInfo, flops: float) -> None:
        self.steps += 1
        self.flops += flops
        self.skipped += not info.updated
        self.elapsed_s += info.elapsed_s
        self.nan += not math.isfinite(info.loss)
        if info.updated:
            self.losses.append(info.losses)


class Reporter:
    """Records every step and prints means. All ranks call the same methods at the same steps."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.interval = _Interval()
        self.printed = False
        self._started_at = job.state.iteration

    def record(self, info: StepInfo) -> None:
        """Records a step; prints the log line at the interval's end and after the first step of the
        launch."""
        single, flops = _Interval(), self.job.flops_per_sample * info.global_batch_size
        single.add(info, flops)
        self.interval.add(info, flops)
        logging, context = self.job.config.logging, self.job.context
        is_due = not self.printed or info.iteration % logging.log_interval == 0
        norm = parameter_norm(self.job) if is_due and logging.log_params_norm else None
        self.job.tracker.step(
            self._report(info, single, info.losses, norm),
            extra={**self._extra(info), **context.scalars},
            micro_batch_size=info.micro_batch_size,
            num_microbatches=info.num_microbatches,
            updated=info.updated,
            **({} if info.max_expert_load is None else {"max_expert_load": info.max_expert_load}),
            **context.step_fields,
        )
        context.scalars.clear()
        context.step_fields.clear()
        self._tell_of_slow_ranks()
        if is_due:
            self._print(info, norm)
        self._look_at_checkpoints(info)

    def finish(self) -> None:
        """Records what callbacks say after the last step, which no step would take along."""
        state, scalars = self.job.state, self.job.context.scalars
        if scalars:
            self.job.tracker.numbers(
                scalars, iteration=state.iteration, consumed_samples=state.consumed_samples
            )
            scalars.clear()

    def _look_at_checkpoints(self, info: StepInfo) -> None:
        """Alerts when the last one is older than two intervals, and again at each further one."""
        interval, latest = self.job.config.checkpoint.save_interval, self.latest_checkpoint
        age = info.iteration - latest
        if self.job.checkpointer is None or not interval or age <= 2 * interval:
            return
        if age % interval == 1 or interval == 1:
            line = f"the last checkpoint is of iteration {latest}, {age} steps ago"
            if self.job.context.checkpoint_iteration is None:
                since = f" of this launch, which began at iteration {latest}" if latest else ""
                line = f"there is no checkpoint yet{since}, after {age} steps"
            self.alert("old checkpoint", line)

    @property
    def latest_checkpoint(self) -> int:
        """Iteration of the last committed checkpoint, or where this launch began."""
        known = self.job.context.checkpoint_iteration
        return self._started_at if known is None else known

    def alert(self, name: str, line: str) -> None:
        """Records and prints what an operator should look at."""
        self._event("alert", alert=name, line=line)
        if dist.get_rank() == 0:
            print(f"ALERT: {line}", flush=True)

    def leaving(self, why: StopReason | None) -> None:
        """Records that somebody outside has asked the run to leave."""
        if why is not None and why.is_urgent:
            self._event("signal", name=str(why))

    def _event(self, kind: str, **fields: Any) -> None:
        state = self.job.state
        self.job.tracker.event(kind, state.iteration, state.consumed_samples, **fields)

    def _tell_of_slow_ranks(self) -> None:
        if (line := self.job.rank_times.slow()) is not None:
            self.alert("slow rank", line)

    def _print(self, info: StepInfo, norm: float | None) -> None:
        losses = self.interval.losses
        names = losses[0] if losses else ()
        means = {name: sum(step[name] for step in losses) / len(losses) for name in names}
        report = self._report(info, self.interval, means, norm)
        context = self.job.context
        context.log_fields.clear()
        context.log_fragments.clear()
        self.job.fire("on_log")
        if is_last_rank():
            first = training_line(report, datetime.now(), more=context.log_fields)
            for line in (first, *context.log_fragments):
                print_line(line)
        self.printed = True
        self.interval = _Interval()

    def _report(
        self,
        info: StepInfo,
        over: _Interval,
        losses: dict[str, float],
        params_norm: float | None,
    ) -> StepReport:
        job, config = self.job, self.job.config
        flops = over.flops / over.elapsed_s / config.layout.world_size
        return StepReport(
            iteration=info.iteration,
            train_iterations=info.iteration + job.iterations_left,
            consumed_samples=info.consumed_samples,
            elapsed_per_iteration_ms=1000.0 * over.elapsed_s / over.steps,
            learning_rate=info.learning_rate,
            global_batch_size=info.global_batch_size,
            seq_length=None if config.segment.is_whole_run else info.seq_length,
            losses=losses,
            loss_scale=float(job.optimizer.get_loss_scale().item()),
            grad_norm=info.grad_norm,
            num_zeros=info.num_zeros,
            params_norm=params_norm,
            throughput_tflops_per_gpu=flops / 1e12 if config.logging.log_throughput else None,
            skipped_samples=job.state.skipped_samples,
            skipped_iterations=over.skipped,
            nan_iterations=over.nan,
        )

    def _extra(self, info: StepInfo) -> dict[str, float]:
        logging = self.job.config.logging
        extra: dict[str, float] = {}
        if info.max_expert_load is not None:
            extra["max-expert-load"] = info.max_expert_load
        if logging.log_world_size_to_tensorboard:
            extra["world-size"] = self.job.config.layout.world_size
        if logging.log_memory_to_tensorboard and self.job.device.is_cuda:
            stats = torch.cuda.memory_stats()
            extra["mem-reserved-bytes"] = stats["reserved_bytes.all.current"]
            extra["mem-allocated-bytes"] = stats["allocated_bytes.all.current"]
            extra["mem-max-allocated-bytes"] = stats["allocated_bytes.all.peak"]
            extra["mem-allocated-count"] = stats["allocation.all.current"]
        return extra

    def evaluation(self, loss: float, *, split: str, where: str = "") -> None:
        """Records and prints the result of an evaluation."""
        state, length = self.job.state, self.job.seq_length
        fields = {} if self.job.config.segment.is_whole_run else {"seq_length": length}
        self.job.tracker.evaluation(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            losses={"lm loss": loss},
            split=split,
            **fields,
        )
        if fields:
            where = f"{where} with samples of {length} tokens".strip()
        if is_last_rank():
            for line in validation_lines(state.iteration, {"lm loss": loss}, where=where):
                print_line(line)
