"""Makes fork tests in running jobs, and the same steps without them.

As a program, `worker_forks.py CASE_JSON FLAG...` is a run of pretrain_gpt.py that makes one fork
test, broken as the case says.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.helpers.jobs import TEXT, evaluations_of, layout_flags, prepare, run

BASE = f"""--hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 2 --global-batch-size 8 --lr 5e-3
{TEXT} --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0.1 --attention-dropout 0.1 --eval-iters 2 --eval-interval 3 --log-interval 1000
--pad-vocab-for-tensor-parallel-size 4 --train-samples 256 --lr-warmup-samples 32
--weight-decay 0.1"""
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-balance lagged
--moe-aux-loss-coeff 0.1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 0.1 --moe-token-dispatcher-type alltoall
--expert-model-parallel-size 2"""
VARIANTS: dict[str, tuple[tuple[int, int, int], str]] = {
    "tp-dp-bf16-overlap": ((2, 1, 1), f"--num-layers 2 --bf16 {OVERLAP}"),
    "vpp-fp16-plain": (
        (1, 2, 2),
        "--num-layers 4 --fp16 --initial-loss-scale 1024 --loss-scale-window 2",
    ),
    "dp-fp32": ((1, 1, 1), f"--num-layers 2 {SHARDED}"),
    "ep-experts": ((1, 1, 1), f"--num-layers 2 {SHARDED} {EXPERTS}"),
}
"""Layout (tp, pp, vpp) and flags; the rest of four ranks is data parallel."""
SAMPLES, EVAL_SAMPLES, KEPT_FROM = 48, 12, 3
SETTINGS = {"global_batch_size": 16, "micro_batch_size": 4, "lr_factor": 1.5}
"""Of the branch that is kept, from the step after `KEPT_FROM` on."""
LAST = 9
"""Step at which both runs end."""


def state_of_rank(job: Any, observer: Any) -> dict[str, Any]:
    """All that a rank's part of a run depends on, as short texts."""
    import torch
    from megatron.core import tensor_parallel

    from megatron.training.model.moe import routers_of
    from megatron.training.model.shards import own_shards, parts_of

    shards = own_shards(job.model, job.optimizer, job.groups)
    scalers = [getattr(part, "grad_scaler", None) for part in parts_of(job.optimizer)]
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    streams = tracker.get_states()
    weights = [p for chunk in job.model.chunks for p in chunk.parameters()]
    state = job.state.to_json()
    kept_by_callbacks = state.pop("callbacks")
    routers = [router for _, router in routers_of(job.model.chunks)]
    return {
        "biases": digest(r.expert_bias for r in routers if r.expert_bias is not None),
        "shards": digest(t for tensors in shards.tensors for t in tensors.values()),
        "weights": digest(weights),
        "random": digest([torch.get_rng_state(), *streams.values()]),
        "groups": repr(
            [{k: v for k, v in g.items() if k != "params"} for g in job.optimizer.param_groups]
        ),
        "scalers": repr([scaler and scaler.state_dict() for scaler in scalers]),
        "schedule": job.scheduler.num_steps,
        "state": json.dumps(state, sort_keys=True),
        "noise": json.dumps([observer.to_json(), kept_by_callbacks], sort_keys=True),
        "watchdog": job.watchdog.iteration,
    }


def digest(tensors: Any) -> str:
    """Of the bits of some tensors."""
    import torch

    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def gathered(job: Any) -> None:
    """Gives every replica all weights, as a forward pass does first."""
    for chunk in job.model.chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def plain_run(folder: Path, base: str) -> dict[str, Any]:
    """The run without fork tests: at one step it goes on as the kept branch would. The average of
    its weights is taken by hand."""
    import torch

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from megatron.training.common.step_settings import Request, StepSettings
    from megatron.training.model.shards import own_shards, parts_of
    from megatron.training.train.evaluate import held_out_loss

    class Plain(GradientNoiseCallback):
        """See above."""

        def __init__(self) -> None:
            super().__init__(CopusConfig(copus=True))
            self.masters: list[list[torch.Tensor]] = []
            self.losses: dict[str, float] = {}
            self.end: dict[str, Any] = {}

        def on_train_step_end(self, context: Any) -> Request | None:
            super().on_train_step_end(context)
            end = KEPT_FROM + SAMPLES // 16
            at = context.state.iteration
            if at == KEPT_FROM:
                return Request(kind="change", reason="", settings=StepSettings(**SETTINGS))
            if at in (end - 1, end):  # the second half of three steps
                model = SimpleNamespace(chunks=context.model)
                live = own_shards(model, context.optimizer, context.groups)  # type: ignore[arg-type]
                self.masters.append([t["param"].clone() for t in live.tensors])
            if at == end:
                return Request(kind="change", reason="", move=self.judge)
            return Request(kind="change", reason="", move=self.note_end) if at == LAST - 1 else None

        @torch.no_grad()
        def judge(self, job: Any) -> None:
            live = own_shards(job.model, job.optimizer, job.groups)
            last = self.masters[-1]
            mean = [(one.double() + other.double()) / 2 for one, other in zip(*self.masters)]
            for name, values in (("averaged", mean), ("last", last)):
                for tensors, value in zip(live.tensors, values):
                    tensors["param"].copy_(value)
                for part in parts_of(job.optimizer):
                    if hasattr(part, "_copy_main_params_to_model_params"):
                        part._copy_main_params_to_model_params()
                if job.config.parallel.use_distributed_optimizer:
                    for chunk in job.model.chunks:
                        chunk.start_param_sync(force_sync=True)
                loss = held_out_loss(job, job.valid_data, num_samples=EVAL_SAMPLES)
                assert isinstance(loss, float)
                self.losses[name] = loss

        def note_end(self, job: Any) -> None:
            gathered(job)
            self.end = state_of_rank(job, self.observer)

    callback = Plain()
    steps = run(["--exit-interval", str(LAST)], folder, [callback], base=base)
    return {
        "steps": steps,
        "losses": callback.losses,
        "evaluations": evaluations_of(folder) if steps else [],
        "end": callback.end,
    }


def forked_run(folder: Path, base: str) -> dict[str, Any]:
    """The run with fork tests: one refused, one discarded, one kept, one broken on all ranks in
    the middle of a step, one after that, and one stopped by a signal."""
    import torch.distributed as dist

    from copus_ext.controller.decision_log import DecisionLog
    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.fork_test import ForkTests
    from copus_ext.controller.gns_callback import GradientNoiseCallback
    from copus_ext.goodput.fork_result import Branch, ForkPlan
    from megatron.training.common.step_settings import Request

    same = Branch(global_batch_size=8, micro_batch_size=2)
    other = Branch(**SETTINGS)  # type: ignore[arg-type]

    class Forked(GradientNoiseCallback):
        """See above."""

        def __init__(self) -> None:
            super().__init__(CopusConfig(copus=True))
            self.results: list[dict[str, Any]] = []
            self.changed: list[str] = []
            self.end: dict[str, Any] = {}
            self.events: Counter[str] = Counter()
            self.beats: list[int] = []
            self.shown: list[int] = []

        def on_setup_start(self, context: Any) -> None:
            super().on_setup_start(context)
            self.tests = ForkTests(DecisionLog(context.run_dir))

        def on_grads_ready(self, context: Any) -> None:
            super().on_grads_ready(context)
            self.events["grads"] += 1

        def on_eval_step_start(self, context: Any) -> None:
            self.events["evaluated batches"] += 1

        def on_checkpoint_saved(self, context: Any) -> None:
            self.events[f"saved {context.checkpoint_iteration}"] += 1

        def on_train_step_end(self, context: Any) -> Request | None:
            super().on_train_step_end(context)
            moves = {
                1: self.refused,
                2: self.discarded,
                KEPT_FROM: self.kept,
                LAST - 2: self.broken,
                LAST - 1: self.stopped,
            }
            move = moves.get(context.state.iteration)
            return None if move is None else Request(kind="change", reason="", move=move)

        def make(self, job: Any, keep: Any = None, branches: Any = (same, other)) -> None:
            """One fork test; notes what it has changed if it keeps nothing."""
            gathered(job)
            before = state_of_rank(job, self.observer)
            plan = ForkPlan(
                branches=branches, samples=SAMPLES, eval_samples=EVAL_SAMPLES, keep=keep
            )
            beats = job.watchdog._beats
            request = self.tests.request(plan, done=lambda r: self.results.append(r.to_json()))
            assert request.move is not None
            request.move(job)
            self.beats.append(job.watchdog._beats - beats)
            after = state_of_rank(job, self.observer)
            if keep is None:
                self.changed += [name for name in before if before[name] != after[name]]

        def refused(self, job: Any) -> None:
            with mock.patch("copus_ext.reshard.kept_state.free_bytes", return_value=1e4):
                self.make(job)

        def discarded(self, job: Any) -> None:
            watchdog = job.watchdog
            self.tests.fault = lambda topic: self.shown.append(watchdog.iteration)
            self.make(job, branches=(other, other))
            self.tests.fault = lambda topic: None

        def kept(self, job: Any) -> None:
            self.make(job, lambda result: len(result.branches) - 1)

        def broken(self, job: Any) -> None:
            with broken_step(job.model.core_config) as arm:
                self.tests.fault = arm
                self.make(job)
            self.make(job)
            self.tests.ended = None

        def stopped(self, job: Any) -> None:
            gathered(job)
            self.end = state_of_rank(job, self.observer)

            def stop(topic: str) -> None:
                if topic == "branch 0: step 2" and dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGTERM)

            self.tests.fault = stop
            self.make(job)

    callback, out = Forked(), io.StringIO()
    save = ["--save", str(folder / "save"), "--save-interval", "5"]
    steps = run(save, folder, [callback], base=base, out=out)
    return {
        "steps": steps,
        "results": callback.results,
        "changed": callback.changed,
        "evaluations": evaluations_of(folder) if steps else [],
        "end": callback.end,
        "events": callback.events,
        "beats": callback.beats,
        "shown": sorted(set(callback.shown)),
        "out": out.getvalue(),
    }


@contextmanager
def broken_step(core_config: Any) -> Iterator[Callable[[str], None]]:
    """All ranks fail in the second step of a branch, while the gradients are being reduced.

    Args:
        core_config: megatron-core's, of the model.

    Yields:
        What to call with the topic of each part.
    """
    reduce, is_armed = core_config.finalize_model_grads_func, False

    def arm(topic: str) -> None:
        nonlocal is_armed
        is_armed = topic == "branch 0: step 2"

    def fail(*args: Any, **kwargs: Any) -> Any:
        if is_armed:
            raise RuntimeError("broken on purpose")
        return reduce(*args, **kwargs)

    with mock.patch.object(core_config, "finalize_model_grads_func", fail):
        yield arm


def main(output: Path) -> Any:
    """Returns what both runs of every variant did on all ranks."""
    import torch.distributed as dist

    found = {}
    for name, (layout, flags) in VARIANTS.items():
        base = f"{BASE} {flags} {' '.join(layout_flags(*layout))}"
        own = {
            "plain": plain_run(output / f"{name}-plain", base),
            "forked": forked_run(output / f"{name}-forked", base),
        }
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, own)
        found[name] = rows
    return found


def one(case: dict[str, Any], flags: list[str]) -> int:
    """Trains as pretrain_gpt.py does, with one fork test.

    Args:
        case: `at`: step; `topic`, `rank`, `kind`: what goes wrong, see `strike`.
        flags: of the run.
    """
    prepare()
    from copus_ext.commands import pretrain
    from copus_ext.controller.decision_log import DecisionLog
    from copus_ext.controller.fork_test import ForkTests
    from copus_ext.goodput.fork_result import Branch, ForkPlan
    from megatron.training.common.step_settings import Request
    from megatron.training.train.callbacks import Callback
    from tests.distributed.worker_switch_faults import strike

    class Once(Callback):
        """Makes a test at one step."""

        def on_setup_start(self, context: Any) -> None:
            self.tests = ForkTests(DecisionLog(context.run_dir))
            self.tests.patience_s = 3.0
            self.tests.fault = self.fault

        def fault(self, topic: str) -> None:
            if (topic, int(os.environ["RANK"])) == (case["topic"], case["rank"]):
                strike(case["kind"])

        def on_train_step_end(self, context: Any) -> Request | None:
            if context.state.iteration != case["at"]:
                return None
            branch = Branch(global_batch_size=8, micro_batch_size=1, lr_factor=2.0)
            return self.tests.request(ForkPlan(branches=(branch,), samples=32, eval_samples=4))

    pretrain.controllers = lambda args: [Once()]
    return pretrain.main(flags)


if __name__ == "__main__":
    code = one(json.loads(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
