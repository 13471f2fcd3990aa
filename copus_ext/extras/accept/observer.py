"""What a check asks of a run of `pretrain_gpt.py` besides its flags: to move through layouts, to
load checkpoints, to fill the memory, to lose a rank, and to say at the end what every rank
holds."""

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
_EDGE, _SPARE_BYTES = (0.97, 1.03), 64 * _MIB
"""Of the memory that a move needs: what is free when it is asked for; and what nothing takes."""


def callbacks(config: Any, controller: Any) -> list[Callback]:
    """The observer of a run that a check has started; nothing in any other run."""
    path = os.environ.get(VARIABLE)
    if not path:
        return []
    task = parse_json(Path(path).read_text())
    if task.get("bind"):
        _bind_device()
    return [Observer(task)]


class Observer(Callback):
    """Does what a task says.

    Args:
        task: `folder` for a file of each rank; `walk`, layouts to move to, one at the end of each
            step from `at` on; `free`, the share of a GPU's memory that stays free meanwhile,
            beside what torch has taken for steps; `edge`, true to have each move refused for want
            of memory first, and done with as much as it asks for;
            `limit_bytes`, what the run may use of it; `kill`, with a rank, an iteration and an
            event: `forward`, `reduce` or `share`; `load`, checkpoints to load before the first
            step, by name; `reshard`, layouts for `reshards.compared`; `bind`, tell torch of the
            GPU as it joins the world; `sums`, false to leave out those of the end.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._folder = Path(task["folder"])
        self._row: dict[str, Any] = {"moves": []}
        self._mover: Any = None
        self._ballast: Any = None
        self._bits: dict[str, Any] | None = None
        """Sums over the state before a move, until they were compared with those behind it."""

    def on_setup_start(self, context: CallbackContext) -> None:
        if self._task.get("walk"):
            from copus_ext.reshard.inprocess import InProcessResharder

            self._mover = InProcessResharder()
        if self._task.get("kill"):
            from megatron.trainer.train import step

            share = step.share_numbers

            def share_or_die(*args: Any, iteration: int, **named: Any) -> Any:
                self._strike("share", iteration)
                return share(*args, iteration=iteration, **named)

            step.share_numbers = share_or_die

    def on_train_start(self, context: CallbackContext) -> None:
        if places := self._task.get("load"):
            self._row["loaded"] = {name: _load(place, context) for name, place in places.items()}
        limit = self._task.get("limit_bytes")
        if limit is not None:
            import torch

            _, total = torch.cuda.mem_get_info()
            self._fill(total - int(limit))

    def on_train_step_start(self, context: CallbackContext) -> None:
        # The iteration counts finished steps.
        self._strike("forward", context.state.iteration + 1)
        if self._bits is not None:
            self._row["moves"][-1]["keeps_bits"] = _bits(context) == self._bits
            self._bits = None

    def on_grads_ready(self, context: CallbackContext) -> None:
        self._strike("reduce", context.state.iteration + 1)

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        moves, walk = self._row["moves"], self._task.get("walk", ())
        done = context.state.iteration - self._task.get("at", 2)
        if self._mover is None or not 0 <= done <= len(walk):
            return None
        if moves:
            # With all that a step in this layout has made.
            moves[-1] |= _held()
        if done == len(walk):
            return None
        # Sums need memory, too.
        self._bits = None if "free" in self._task else _bits(context)
        return Request(kind="change", reason="copus accept", move=self._move)

    def on_train_end(self, context: CallbackContext) -> None:
        if self._mover is not None:
            self._mover.close()
        self._ballast = None
        # First, as sums need memory, too.
        self._row |= _memory(context)
        if self._task.get("sums", True):
            self._row |= _sums(context)
        if walk := self._task.get("reshard"):
            from copus_ext.extras.accept.reshards import compared

            self._row["reshards"] = compared(context.config, _shards(context), walk)
        (self._folder / f"rank{_rank()}.json").write_text(json.dumps(self._row))

    def _strike(self, event: str, iteration: int) -> None:
        """Kills this rank once, where the task says so."""
        kill = self._task.get("kill")
        if not kill or (kill["event"], kill["iteration"]) != (event, iteration):
            return
        mark = self._folder / "killed"
        if kill["rank"] == _rank() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _move(self, job: Any) -> None:

        moves = self._row["moves"]
        share, text = self._task.get("free"), self._task["walk"][len(moves)]
        if share is not None and not moves:
            import torch

            free, total = torch.cuda.mem_get_info()
            self._fill(free - int(share * total))
        attempt = self._at_edge if self._task.get("edge") else self._attempt
        moves.append(attempt(job, text))

    def _attempt(self, job: Any, text: str) -> dict[str, Any]:
        from copus_ext.reshard.trainer_host import TrainerHost
        from megatron.trainer.config.layout import Layout

        host = TrainerHost(job)
        before = str(host.layout)
        result = self._mover.move(host, Layout.from_text(text), job.state.settings)
        row = {"from": before, "to": text, "kind": result.kind, "reason": result.reason}
        return {**row, "pause_s": result.pause_s, "phases_s": result.phases}

    def _at_edge(self, job: Any, text: str) -> dict[str, Any]:
        """Asks for a move with a little less memory than it needs, then with a little more."""
        import torch

        needed, there = self._needs(job, text)
        rows = []
        for share in _EDGE:
            self._ballast = None
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            self._fill(min(int(there - share * needed), free - _SPARE_BYTES))
            rows.append(self._attempt(job, text))
            if rows[-1]["kind"] == "moved":
                break
        self._ballast = None
        return {**rows[-1], "refused": "; ".join(row["reason"] for row in rows[:-1])}

    def _needs(self, job: Any, text: str) -> tuple[float, float]:
        """Bytes that a move needs of this rank, and those that it would have. It is not made."""
        from copus_ext.reshard import saved_state

        seen, require = [], saved_state.require_memory

        def noted(needed: float, free: float) -> None:
            seen.append((needed, free))
            raise saved_state.TooLarge("asked only for what is needed")

        saved_state.require_memory = noted
        try:
            self._attempt(job, text)
        finally:
            saved_state.require_memory = require
        (found,) = seen
        return found

    def _fill(self, size: int) -> None:
        """Takes so many bytes of the GPU until the run ends."""
        import torch

        if size > 0:
            self._ballast = torch.empty(size, dtype=torch.uint8, device="cuda")


def _bind_device() -> None:
    """Lets torch know the GPU of this rank when it joins the world, as Megatron-LM does. It then
    makes the communicator of each group at once, as a part of the world's."""
    import torch
    import torch.distributed as dist

    join = dist.init_process_group

    def join_bound(*args: Any, **named: Any) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        join(*args, **named, device_id=device)

    dist.init_process_group = join_bound


def _model(context: CallbackContext) -> Any:
    """What functions of the trainer read of a model."""
    from megatron.core.utils import unwrap_model

    return SimpleNamespace(chunks=context.model, unwrapped=unwrap_model(context.model))


def _load(place: str, context: CallbackContext) -> dict[str, int]:
    """Loads a checkpoint into the job; sums over the bits that it then has. Collective."""
    from megatron.trainer.checkpoint.load import load_weights, read_stored

    stored = read_stored(Path(place), step=None, verify=True)
    assert stored is not None
    load_weights(stored, context.config, _model(context), context.optimizer, context.groups)
    return _sums(context)["sums"]


def _shards(context: CallbackContext) -> Any:
    from megatron.trainer.model.shards import local_shards

    return local_shards(_model(context), context.optimizer, context.groups)


def _sums(context: CallbackContext) -> dict[str, Any]:
    """Sums over all bits of weights and moments, as a change of layout compares them, and whether
    the device computes them as the CPU does. Collective."""
    from dataclasses import replace

    import torch

    from copus_ext.reshard.verify import local_sums

    shards, keys = _state(context)
    own = local_sums(shards, keys)
    there = [{kind: t.cpu() for kind, t in row.items()} for row in shards.tensors]
    again = local_sums(replace(shards, tensors=there), keys) if there else own
    is_equal = bool(torch.equal(own.cpu(), again.cpu()))
    return {"sums": _bits(context), "device_sums_as_on_cpu": is_equal}


def _bits(context: CallbackContext) -> dict[str, Any]:
    """The sums of `_sums` alone. Collective."""
    import torch.distributed as dist

    from copus_ext.reshard.verify import all_sums, local_sums

    shards, keys = _state(context)
    return all_sums(local_sums(shards, keys), keys, group=dist.group.WORLD)


def _state(context: CallbackContext) -> tuple[Any, list[str]]:
    """The shards of this rank, and the names of those of all ranks. Collective."""
    from megatron.trainer.common.collectives import all_gather_object
    from megatron.trainer.model.shards import local_shards

    shards = local_shards(_model(context), context.optimizer, context.groups, with_the_rest=True)
    known = all_gather_object([record.key for record in shards.records])
    return shards, sorted({key for row in known for key in row})


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
        # What torch keeps for later differs by where a change comes from.
        torch.cuda.empty_cache()
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
    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.gpus import kind_of
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
    measured = {
        "peak_bytes": float(torch.cuda.max_memory_reserved() + outside),
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "padded_vocab_size": config.model.padded_vocab_size,
    }
    try:
        cluster = preset(f"{kind_of(*gpu)}:{config.layout.world_size}")
        rows = to_config_batch(model_of(config), cluster, one)
        step_s = step_time(rows, cluster.load_constants()).step_s
        predicted = {"predicted_bytes": peaks(rows)[0], "predicted_s": step_s}
    except SpecError:
        return measured
    return {**measured, **{name: float(values[0]) for name, values in predicted.items()}}
