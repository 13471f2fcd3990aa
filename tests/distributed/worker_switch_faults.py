"""Breaks changes of layout on purpose.

worker_switch_faults.py many OUTPUT_DIR
    Many changes of one running job, each broken on one rank at one place.
worker_switch_faults.py one CASE_JSON FLAG...
    A run of pretrain_gpt.py that changes its layout once, broken as the case says.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16
--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3
--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --swiglu --normalization RMSNorm
--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
--hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --log-interval 1000
--pad-vocab-for-tensor-parallel-size 2 --use-distributed-optimizer"""
TO = {"tp": (2, 1), "pp": (1, 2)}
"""Tensor and pipeline sizes to change to."""
BEFORE, AFTER = 2, 3
KINDS = ("raise", "memory", "oom")
PATIENCE_S, TIMEOUT_S = 2.0, 8.0


def topics(*, waiting: bool) -> list[str]:
    """Where a change can be broken, in order.

    Args:
        waiting: those where the other ranks wait for the broken one in a collective, or those
            where they come to the vote.
    """
    from copus_ext.reconfigure.phases import PHASES, TOGETHER

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


def many(output: Path) -> None:
    """Writes, for every change, what came of it, and the losses with and without."""
    import psutil
    import torch.distributed as dist

    from copus_ext.reconfigure.inprocess import Mover
    from megatron.training.callbacks import Callback, CallbackContext
    from megatron.training.layout import Layout
    from megatron.training.settings import Request
    from tests.distributed.worker_relayout import equal, state_of
    from tests.helpers.jobs import join, run

    class Unlucky(Callback):
        """Tries many changes at one boundary; all but the last fail."""

        def __init__(self, cases: list[tuple[str, int, str]]) -> None:
            self.cases, self.case = cases, ("", 0, "")
            self.rows: list[dict[str, Any]] = []
            self.mover: Mover | None = None

        def on_setup_start(self, context: CallbackContext) -> None:
            self.mover = Mover(fault=self.fault, patience_s=30)

        def fault(self, topic: str) -> None:
            if (topic, dist.get_rank()) == self.case[:2]:
                strike(self.case[2])

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            if context.state.iteration != BEFORE:
                return None
            return Request(kind="change", reason="test", move=self.wander)

        def on_train_end(self, context: CallbackContext) -> None:
            if self.mover is not None:
                self.mover.close()

        def wander(self, job: Any) -> None:
            assert self.mover is not None
            start = str(job.config.layout)
            before, own, rest = state_of(job)
            for number, case in enumerate(self.cases):
                self.case = case
                tp, pp = list(TO.values())[number % 2]
                to = Layout(tp=tp, pp=pp, vpp=1, dp=dist.get_world_size() // (tp * pp))
                outcome = self.mover.move(job, to, job.state.settings)
                after, now_own, now = state_of(job)
                self.rows.append(
                    {
                        "case": case,
                        "kind": outcome.kind,
                        "reason": outcome.reason,
                        "is_equal": equal(before, after) and equal(own, now_own),
                        "is_rest_equal": rest == now,
                        "is_layout_kept": str(job.config.layout) == start,
                        "num_groups": len(dist.distributed_c10d._world.pg_map),
                        "num_fds": psutil.Process().num_fds(),
                        "num_threads": psutil.Process().num_threads(),
                        "seconds": outcome.pause_s,
                    }
                )

    join()
    places = topics(waiting=False)
    cases = [(t, i % 2, KINDS[i % 3]) for i, t in enumerate(places)]
    cases += [(t, 1 - i % 2, KINDS[i % 3]) for i, t in enumerate(places) if "commit" in t]
    results: dict[str, Any] = {}
    for name, way in (("whole", []), ("broken", cases), ("moved", [cases[0], ("", 0, "")])):
        unlucky = Unlucky(way)
        flags = ["--train-iters", str(BEFORE + AFTER), "--save", str(output / f"{name}-save")]
        steps = run(flags, output / name, [unlucky], base=SMALL)
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, unlucky.rows)
        fields = ("losses", "grad_norm", "learning_rate", "consumed_samples")
        results[name] = {"rows": rows, "steps": [[s[f] for f in fields] for s in steps]}
    if dist.get_rank() == 0:
        (output / "result.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def one(case: dict[str, Any], flags: list[str]) -> int:
    """Trains as pretrain_gpt.py does, with a callback that changes the layout once.

    Args:
        case: `at`: step; `to`: of `TO`; `topic`, `rank`, `kind`: what goes wrong; `back_from`: for
            a topic of the way back, the topic where rank 0 starts it; `output`: folder.
        flags: of the run.
    """
    import pretrain_gpt
    from copus_ext.reconfigure.inprocess import Mover
    from megatron.training.callbacks import Callback, CallbackContext
    from megatron.training.layout import Layout
    from megatron.training.settings import Request

    rank = int(os.environ["RANK"])
    output = Path(case["output"])

    class Once(Callback):
        """Changes the layout at one step."""

        def __init__(self) -> None:
            self.mover: Mover | None = None

        def on_setup_start(self, context: CallbackContext) -> None:
            self.mover = Mover(
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
            tp, pp = TO[case["to"]]
            size = job.config.layout.world_size
            to = Layout(tp=tp, pp=pp, vpp=1, dp=size // (tp * pp))
            outcome = self.mover.move(job, to, job.state.settings)
            (output / f"outcome-{rank}.json").write_text(json.dumps(outcome.to_json()))

    pretrain_gpt._PATIENCE_S = 1
    pretrain_gpt.controllers = lambda args: [Once()]
    return pretrain_gpt.main(flags)


if __name__ == "__main__":
    if sys.argv[1] == "many":
        many(Path(sys.argv[2]))
    else:
        code = one(json.loads(sys.argv[2]), sys.argv[3:])
        sys.stdout.flush()
        sys.stderr.flush()
        sys.exit(code)
