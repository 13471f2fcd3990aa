"""What a check asks of a run of `pretrain_gpt.py` besides its flags: to move through layouts, to
fill the memory, to lose a rank, and to say at the end what every rank holds."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.step_settings import Request
from megatron.trainer.train.callbacks import Callback, CallbackContext

VARIABLE = "COPUS_ACCEPT"
"""Environment variable: a JSON file with the task, which `copus accept` writes."""
_MIB = 1 << 20


def callbacks(config: Any, controller: Any) -> list[Callback]:
    """The observer of a run that a check has started; nothing in any other run."""
    path = os.environ.get(VARIABLE)
    return [Observer(parse_json(Path(path).read_text()))] if path else []


class Observer(Callback):
    """Does what a task says.

    Args:
        task: `folder` for a file of each rank; `walk`, layouts to move to one after the other
            behind step `at`; `free`, the share of a GPU's memory that stays free meanwhile;
            `limit_bytes`, what the run may use of it; `kill`, with a rank, an iteration and an
            event: `forward`, `reduce` or `end`.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._folder = Path(task["folder"])
        self._moves: list[dict[str, Any]] = []
        self._mover: Any = None
        self._ballast: Any = None

    def on_setup_start(self, context: CallbackContext) -> None:
        if self._task.get("walk"):
            from copus_ext.reshard.inprocess import InProcessResharder

            self._mover = InProcessResharder()

    def on_train_start(self, context: CallbackContext) -> None:
        limit = self._task.get("limit_bytes")
        if limit is not None:
            import torch

            _, total = torch.cuda.mem_get_info()
            self._fill(total - int(limit))

    def on_train_step_start(self, context: CallbackContext) -> None:
        self._strike("forward", context)

    def on_grads_ready(self, context: CallbackContext) -> None:
        self._strike("reduce", context)

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        self._strike("end", context)
        if self._mover is None or context.state.iteration != self._task.get("at", 2):
            return None
        return Request(kind="change", reason="copus accept", move=self._walk)

    def on_train_end(self, context: CallbackContext) -> None:
        if self._mover is not None:
            self._mover.close()
        self._ballast = None
        row = {"moves": self._moves, **self._sums(context), **_memory(context)}
        (self._folder / f"rank{_rank()}.json").write_text(json.dumps(row))

    def _strike(self, event: str, context: CallbackContext) -> None:
        """Kills this rank once, where the task says so."""
        kill = self._task.get("kill")
        # The iteration counts finished steps.
        begun = context.state.iteration + (event != "end")
        if not kill or (kill["event"], kill["iteration"]) != (event, begun):
            return
        mark = self._folder / "killed"
        if kill["rank"] == _rank() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _walk(self, job: Any) -> None:
        from copus_ext.reshard.trainer_host import TrainerHost
        from megatron.trainer.config.layout import Layout

        share = self._task.get("free")
        if share is not None:
            import torch

            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            self._fill(free - int(share * total))
        for text in self._task["walk"]:
            host = TrainerHost(job)
            before = str(host.layout)
            result = self._mover.move(host, Layout.from_text(text), job.state.settings)
            row = {"from": before, "to": text, "kind": result.kind, "reason": result.reason}
            row |= {"pause_s": result.pause_s, "phases_s": result.phases, **_held()}
            self._moves.append(row)

    def _fill(self, size: int) -> None:
        """Takes so many bytes of the GPU until the run ends."""
        import torch

        if size > 0:
            self._ballast = torch.empty(size, dtype=torch.uint8, device="cuda")

    def _sums(self, context: CallbackContext) -> dict[str, Any]:
        """Sums over all bits of weights and moments, as a change of layout compares them, and
        whether the device computes them as the CPU does. Collective."""
        from dataclasses import replace

        import torch
        import torch.distributed as dist

        from copus_ext.reshard.verify import all_sums, local_sums
        from megatron.trainer.common.collectives import all_gather_object
        from megatron.trainer.model.shards import local_shards

        model: Any = SimpleNamespace(chunks=context.model)
        shards = local_shards(model, context.optimizer, context.groups, with_the_rest=True)
        known = all_gather_object([record.key for record in shards.records])
        keys = sorted({key for row in known for key in row})
        own = local_sums(shards, keys)
        there = [{kind: t.cpu() for kind, t in row.items()} for row in shards.tensors]
        again = local_sums(replace(shards, tensors=there), keys) if there else own
        sums = all_sums(own, keys, group=dist.group.WORLD)
        is_equal = bool(torch.equal(own.cpu(), again.cpu()))
        return {"sums": sums, "device_sums_as_on_cpu": is_equal}


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _held() -> dict[str, int]:
    """What this process holds: groups, threads, and MiB of the GPU."""
    import torch
    import torch.distributed as dist

    held = {"groups": len(dist.distributed_c10d._world.pg_map)}
    if Path("/proc/self/task").exists():
        held["threads"] = len(os.listdir("/proc/self/task"))
    if torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        held["allocated_mib"] = torch.cuda.memory_allocated() // _MIB
        held["free_mib"] = free // _MIB
    return held


def _memory(context: CallbackContext) -> dict[str, float]:
    """The peak of this GPU, and the peak and the seconds of a step that the planner predicts, if it
    knows such GPUs; empty on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from copus_ext.controller.throughput_table import configuration_of_run, gpu_of, model_of
    from copus_ext.cost_model.cluster_spec import kind_of, preset
    from copus_ext.cost_model.memory import peaks
    from copus_ext.cost_model.spec_file import SpecError
    from copus_ext.cost_model.step import step_time
    from copus_ext.planner.space import points_of, to_config_batch

    config = context.config
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    gpu = gpu_of(config)
    assert context.step is not None and gpu is not None
    sizes = context.step.micro_batch_size, context.step.global_batch_size
    one = points_of([configuration_of_run(config, *sizes)])
    measured = {"peak_bytes": float(torch.cuda.max_memory_reserved() + outside)}
    try:
        cluster = preset(f"{kind_of(*gpu)}:{config.layout.world_size}")
        rows = to_config_batch(model_of(config), cluster, one)
        step_s = step_time(rows, cluster.load_constants()).step_s
        predicted = {"predicted_bytes": peaks(rows)[0], "predicted_s": step_s}
    except SpecError:
        return measured
    return {**measured, **{name: float(values[0]) for name, values in predicted.items()}}
