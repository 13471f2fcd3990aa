"""Breaks changes of layout on purpose.

`many` breaks many changes of one running job, each on one rank at one place. `wrong` has transfers
go wrong without an error. As a program, `worker_relayout_faults.py CASE_JSON FLAG...` is a run of
pretrain_gpt.py that changes its layout once, broken as the case says.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.helpers.jobs import TEXT, prepare

SMALL = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3
{TEXT} --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 1000
--pad-vocab-for-tensor-parallel-size 2 --use-distributed-optimizer"""
EXPERTS = """--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-balance lagged
--moe-aux-loss-coeff 0.1 --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 0.1 --moe-token-dispatcher-type allgather"""
TO = {"tp": (2, 1), "pp": (1, 2)}
"""Tensor and pipeline sizes to change to."""
TO_EXPERTS = {"ep": (1, 1, 2), "tp and ep": (2, 1, 2)}
"""The same with expert parallel size, of a run with `EXPERTS`."""
BEFORE, AFTER = 2, 3
LENGTH = ("--train-iters", str(BEFORE + AFTER))
UNCUT = """--tensor-model-parallel-size 2 --micro-batch-size 2 --rampup-batch-size 4 2 12
--global-batch-size 6"""
"""Batches of 4, and later of 6. On two replicas micro-batches of 2 cut only the first of them."""
KINDS = ("raise", "memory", "oom")
PATIENCE_S, TIMEOUT_S = 3.0, 12.0


def topics(*, waiting: bool) -> list[str]:
    """Where a change can be broken, in order.

    Args:
        waiting: those where the other ranks wait for the broken one in a collective, or those
            where they come to the vote.
    """
    from copus_ext.reshard.phases import PHASES, TOGETHER

    if not waiting:
        return [*PHASES[:-1], *(p + TOGETHER for p in ("prepare", "drain", "commit"))]
    names = ("extract", "tear down", "groups", "optimizer", "transfer", "weights", "verify")
    return [p + TOGETHER for p in names]


def strike(kind: str) -> None:
    """What goes wrong."""
    import torch

    if kind == "raise":
        raise RuntimeError("broken on purpose")
    if kind == "memory":
        raise MemoryError("no memory, on purpose")
    if kind == "oom":
        raise torch.OutOfMemoryError("no memory on the device, on purpose")
    if kind == "hang":
        while True:
            time.sleep(1)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[kind])


def layout_of(sizes: tuple[int, ...], world_size: int) -> Any:
    """The layout of tensor and pipeline size, and with experts of expert parallel size."""
    from megatron.trainer.config.layout import Layout

    tp, pp, *ep = sizes
    experts: Any = {"ep": ep[0], "etp": 1} if ep else {}
    return Layout(tp=tp, pp=pp, dp=world_size // (tp * pp), **experts)


def wandering(
    cases: list[Any], layouts: list[tuple[int, ...]], attempt: Any, **mover_arguments: Any
) -> Any:
    """A callback that tries many changes at one boundary and notes what each did to the job.

    Args:
        cases: in order.
        layouts: (tp, pp), or (tp, pp, ep), to change to, in turns.
        attempt: context manager, called with a case, around its change.
        mover_arguments: of the mover.
    """
    import torch.distributed as dist

    from copus_ext.reshard.trainer_host import TrainerHost
    from tests.distributed.worker_relayout import equal, state_of, wanderer

    def visit(job: Any, mover: Any) -> Iterator[dict[str, Any]]:
        start = str(job.config.layout)
        before, own, rest = state_of(job)
        for number, case in enumerate(cases):
            to = layout_of(layouts[number % len(layouts)], dist.get_world_size())
            with attempt(case):
                outcome = mover.move(TrainerHost(job), to, job.state.settings)
            after, now_own, now = state_of(job)
            yield {
                "case": case,
                "kind": outcome.kind,
                "reason": outcome.reason,
                "is_equal": equal(before, after) and equal(own, now_own),
                "is_rest_equal": rest == now,
                "is_layout_kept": str(job.config.layout) == start,
            }

    return wanderer(visit, patience_s=30, **mover_arguments)


def trained(
    callback: Any, folder: Path, *flags: str, length: tuple[str, ...] = LENGTH
) -> dict[str, Any]:
    """Trains; the rows of all ranks and the steps."""
    import torch.distributed as dist

    from tests.helpers.jobs import run

    steps = run([*length, *flags], folder, [callback], base=SMALL)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, callback.rows)
    fields = ("losses", "grad_norm", "learning_rate", "consumed_samples")
    return {"rows": rows, "steps": [[s[f] for f in fields] for s in steps]}


def many(output: Path) -> dict[str, Any]:
    """Broken changes, and the losses with and without them."""
    import torch.distributed as dist

    current: list[Any] = [None]
    seen: set[str] = set()

    @contextlib.contextmanager
    def attempt(case: Any) -> Iterator[None]:
        current[0] = case
        yield

    def fault(topic: str) -> None:
        seen.add(topic)
        place, rank, kind = current[0]
        if (topic, dist.get_rank()) == (place, rank):
            strike(kind)

    places = topics(waiting=False)
    cases = [(t, i % 2, KINDS[i % 3]) for i, t in enumerate(places)]
    cases += [(t, 1 - i % 2, KINDS[i % 3]) for i, t in enumerate(places) if "commit" in t]
    results = {}
    for name, way in (("whole", []), ("broken", cases), ("moved", [cases[0], ("", 0, "")])):
        callback = wandering(way, list(TO.values()), attempt, fault=fault)
        results[name] = trained(callback, output / name, "--save", str(output / f"{name}-save"))
    to = [(1, 1, 2), (2, 1, 2)]
    for name, way in (("experts whole", []), ("experts broken", cases)):
        callback = wandering(way, to, attempt, fault=fault)
        results[name] = trained(callback, output / name, *EXPERTS.split())
    for name, way in (("uncut whole", []), ("uncut", [("", 0, "")])):
        callback = wandering(way, [(1, 1)], attempt, fault=fault)
        more = {"length": ("--train-samples", "26")}
        results[name] = trained(callback, output / name, *UNCUT.split(), **more)
    return results | {"topics": sorted(seen)}


WRONG = ("gate and up", "shift", "drop", "wrong place", "bit", "copy", "step", "weight")


def wrong(output: Path) -> dict[str, Any]:
    """Changes after which the state would not be what it was."""
    results = {}
    for name, cases, to, flags in (
        ("to tp", WRONG, (2, 1), []),
        ("to dp", ("replica",), (1, 1), ["--tensor-model-parallel-size", "2"]),
    ):
        callback = wandering(list(cases), [to], spoiled)
        results[name] = trained(callback, output / name, "--bf16", *flags)
    return results


@contextlib.contextmanager
def spoiled(name: str) -> Iterator[None]:
    """On rank 1 a transfer, the counts or the weights come out wrong without an error; on the way
    back they do not."""
    import torch
    import torch.distributed as dist

    from copus_ext.reshard import change
    from copus_ext.reshard.transfer import Transfer

    class Spoiled(Transfer):
        def _target_view(self, part: Any) -> torch.Tensor:
            view = super()._target_view(part)
            first = next(iter(self._in.values()))[0].parts[0]
            if part.op != first.op or part.kind == "param":
                return view
            if name == "drop":
                return torch.empty_like(view) if part.kind == "exp_avg" else view
            other = {"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}[part.kind]
            changed = replace(part, kind=other)
            return super()._target_view(changed) if name == "wrong place" else view

        def exchange(self) -> None:
            super().exchange()
            spoil(name, self._target)

    def counts(optimizer: Any, **saved: Any) -> None:
        restore_counts(optimizer, **saved)
        for group in optimizer.param_groups if name == "step" and not done else ():
            group["step"] += 1
        done.append("counts")

    def weights(config: Any, model: Any, **how: Any) -> None:
        share_weights(config, model, **how)
        if name in ("weight", "replica") and "weights" not in done:
            # Rank 1 holds the masters of all, or of the first parameters.
            params = list(model.chunks[0].parameters())
            params[0 if name == "weight" else -1].data.view(torch.int16).view(-1)[-1] ^= 1
        done.append("weights")

    done: list[str] = []
    restore_counts, share_weights = change.restore_counts, change.share_weights
    if dist.get_rank() == 1:
        change.Transfer, change.restore_counts, change.share_weights = Spoiled, counts, weights
    try:
        yield
    finally:
        change.Transfer = Transfer
        change.restore_counts, change.share_weights = restore_counts, share_weights


def spoil(name: str, shards: Any) -> None:
    """Puts elements of a rank's new shards wrong."""
    import torch

    records = [r for r in shards.records if name == "copy" or r.is_first]
    if name == "gate and up":
        one, other = [r for r in records if "linear_fc1.weight" in r.key][:2]
        assert one.shard == other.shard and one.numel == other.numel, (one, other)
        flat = shards.tensors[one.shard]["exp_avg"]
        a, b = (flat[r.offset : r.offset + r.numel] for r in (one, other))
        a[:], b[:] = b.clone(), a.clone()
    elif name == "shift":
        flat = shards.tensors[max(records, key=lambda r: r.numel).shard]["param"]
        flat.copy_(flat.roll(1))
    elif name in ("bit", "copy"):
        record = next(r for r in records if not r.is_first or name == "bit")
        shards.tensors[record.shard]["exp_avg_sq"].view(torch.int32)[record.offset] ^= 1


def one(case: dict[str, Any], flags: list[str]) -> int:
    """Trains as pretrain_gpt.py does, with a callback that changes the layout once.

    Args:
        case: `at`: step; `to`: of `TO`; `topic`, `rank`, `kind`: what goes wrong; `back_from`: for
            a topic of the way back, the topic where rank 0 starts it; `output`: folder.
        flags: of the run.
    """
    prepare()
    from copus_ext.commands import pretrain
    from copus_ext.reshard.inprocess import InProcessResharder
    from copus_ext.reshard.trainer_host import TrainerHost
    from megatron.trainer.common.step_settings import Request
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    rank = int(os.environ["RANK"])
    output = Path(case["output"])

    class Once(Callback):
        """Changes the layout at one step."""

        def __init__(self) -> None:
            self.mover: InProcessResharder | None = None

        def on_setup_start(self, context: CallbackContext) -> None:
            self.mover = InProcessResharder(
                run_dir=output, fault=self.fault, patience_s=PATIENCE_S, min_timeout_s=TIMEOUT_S
            )

        def fault(self, topic: str) -> None:
            if topic == case.get("back_from") and rank == 0:
                strike("raise")
            if (topic, rank) == (case["topic"], case["rank"]):
                (output / "struck").write_text(str(time.time()))
                strike(case["kind"])

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            if context.state.iteration != case["at"]:
                return None
            return Request(kind="change", reason="test", move=self.move)

        def on_train_end(self, context: CallbackContext) -> None:
            if self.mover is not None:
                self.mover.close()

        def move(self, job: Any) -> None:
            assert self.mover is not None
            size = job.config.layout.world_size
            to = layout_of({**TO, **TO_EXPERTS}[case["to"]], size)
            outcome = self.mover.move(TrainerHost(job), to, job.state.settings)
            (output / f"outcome-{rank}.json").write_text(json.dumps(outcome.to_json()))

    pretrain._PATIENCE_S = 1
    pretrain.controllers = lambda args, config: [Once()]
    return pretrain.main(flags)


def main(output: Path, what: str) -> Any:
    return {"many": many, "wrong": wrong}[what](output)


if __name__ == "__main__":
    code = one(json.loads(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
