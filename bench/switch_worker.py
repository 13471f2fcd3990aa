"""What runs on every rank of bench/switch_cost.py: one job that changes its layout, by the way of
the trainer and by the two ways it is compared with.

Everything happens at one step boundary of `pretrain`, so that the job is exactly that of a run.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from jobs import parse, step_of_loop
from support import ROOT, peak_rss, reset_peak, torchrun
from switch_gloo import bytes_between, exchange

from copus_ext.reshard.inprocess import InProcessResharder
from copus_ext.reshard.plan import BYTES_PER_ELEMENT
from megatron.training.checkpoint.load import load_weights
from megatron.training.checkpoint.resume import read_stored
from megatron.training.common.collectives import all_gather_object, broadcast_from_rank0
from megatron.training.common.step_settings import Request
from megatron.training.config.layout import Layout
from megatron.training.config.relayout import with_layout
from megatron.training.distributed.process_groups import destroy_groups
from megatron.training.logging.metrics import read_metrics
from megatron.training.model.gpt import build_model
from megatron.training.optim.optimizer import build_optimizer
from megatron.training.train.build import groups_of, install_layout, release_layout
from megatron.training.train.callbacks import Callback, CallbackContext
from megatron.training.train.pretrain import pretrain
from megatron.training.train.reporting import Reporter
from tests.helpers.walks import walk

LAYOUTS = {
    2: [Layout(dp=2), Layout(pp=2), Layout(tp=2)],
    4: [Layout(dp=4), Layout(pp=2, dp=2), Layout(tp=2, dp=2), Layout(tp=2, pp=2)],
}
"""By number of ranks, what is changed between."""
_OF_A_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")


class Measuring(Callback):
    """Hands the job over at the end of the first step, and ends the run after the next one."""

    def __init__(self, act: Callable[[Any, InProcessResharder], None], *, quick: bool) -> None:
        self.act, self.quick = act, quick
        self.mover: InProcessResharder | None = None
        self.stage = 0

    def on_setup_start(self, context: CallbackContext) -> None:
        self.mover = InProcessResharder(prebuild=2 if self.quick else 0, sample=self.quick)

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        if self.stage == 0:
            self.stage = 1
            return Request(kind="change", reason="measurement", move=self._begin)
        return Request(kind="stop", reason="measured") if self.stage == 2 else None

    def on_train_end(self, context: CallbackContext) -> None:
        if self.mover is not None:
            self.mover.close()

    def _begin(self, job: Any) -> None:
        assert self.mover is not None
        self.act(job, self.mover)
        self.stage = 2


class Bench:
    """One job, and the ways to another layout."""

    def __init__(
        self, job: Any, mover: InProcessResharder, *, flags: list[str], launcher: str, folder: Path
    ) -> None:
        self.job, self.mover, self.flags, self.launcher = job, mover, flags, launcher
        self.folder, self.reporter = folder, Reporter(job)
        self.layouts = LAYOUTS[dist.get_world_size()]
        self.rows: list[dict[str, Any]] = []

    def step(self) -> float:
        """Trains a step; seconds."""
        dist.barrier()
        begin = time.perf_counter()
        step_of_loop(self.job, self.reporter)
        return time.perf_counter() - begin

    def note(self, kind: str, start: Layout, to: Layout, **fields: Any) -> None:
        """Keeps a row, and says so."""
        self.rows.append({"kind": kind, "from": str(start), "to": str(to), **fields})
        if dist.get_rank() == 0:
            print(
                f"{kind} {start} -> {to}: {fields['pause_s']:.3f} s",
                file=sys.__stdout__,
                flush=True,
            )

    def change(self, to: Layout, *, compare: bool = False, **fields: Any) -> None:
        """Changes in the same processes, then takes two steps.

        Args:
            to: layout.
            compare: then send as many bytes over bare gloo.
            fields: kept in the row.
        """
        job, start = self.job, self.job.config.layout
        begin = time.perf_counter()
        route = self.mover.route(job.config, to)
        planning_s = time.perf_counter() - begin
        reset_peak()
        first = self.step()
        step_peak = peak_rss()
        reset_peak()
        dist.barrier()
        outcome = self.mover.move(job, to, job.state.settings)
        if outcome.kind != "moved":
            raise RuntimeError(f"{start} -> {to}: {outcome.reason}")
        peaks = all_gather_object((peak_rss(), step_peak))
        if compare:
            fields["gloo_s"] = max(
                all_gather_object(exchange(self.mover._group, bytes_between(route)))
            )
        first, normal = self.step(), self.step()
        self.note(
            "change",
            start,
            to,
            pause_s=outcome.pause_s,
            phases=outcome.phases,
            planning_s=planning_s,
            wire_bytes=outcome.wire_bytes,
            minimum_bytes=outcome.minimum_bytes,
            busiest_bytes=outcome.busiest_bytes,
            state_bytes=BYTES_PER_ELEMENT * sum(r.numel for own in route.target for r in own),
            num_messages=outcome.num_messages,
            peak_rss=max(p for p, _ in peaks),
            step_peak_rss=max(p for _, p in peaks),
            first_step_s=first,
            step_s=normal,
            **fields,
        )

    def save(self) -> float:
        """Saves a checkpoint; seconds."""
        job = self.job
        dist.barrier()
        begin = time.monotonic()
        job.checkpointer.save(job.model, job.optimizer, job.scheduler, job.state)
        return time.monotonic() - begin

    def restart(self, to: Layout, **fields: Any) -> None:
        """Saves, and takes one step under another layout in new processes; this job stays as it
        is. That the old processes end is not counted."""
        start = self.job.config.layout
        dist.barrier()
        begin = time.monotonic()
        save_s = self.save()
        found, cpu_s = None, time.process_time()
        if dist.get_rank() == 0:
            loaded, started, stepped = self._launch(to)
            found = {
                "save": save_s,
                "start and check": started - begin - save_s,
                "build and load": loaded - started,
                "data and first step": stepped - loaded,
            }
        parts = broadcast_from_rank0(found)
        # What the waiting processes take away from the new ones; should be nothing.
        fields["waiting_cpu_s"] = sum(all_gather_object(time.process_time() - cpu_s))
        self.step()
        self.note("restart", start, to, pause_s=sum(parts.values()), phases=parts, **fields)

    def _launch(self, to: Layout) -> tuple[float, float, float]:
        """Runs the trainer for one step in new processes.

        Returns:
            When it had loaded, when it had opened its record, and when it had taken the step.
        """
        world = dist.get_world_size()
        run_dir = Path(tempfile.mkdtemp(dir=self.folder))
        root = self.job.config.checkpoint.save
        own = [*self.flags, "--load", root, "--run-dir", run_dir, "--exit-interval", 1]
        own += ["--tensor-model-parallel-size", to.tp, "--pipeline-model-parallel-size", to.pp]
        own += ["--sequence-parallel"] if to.tp > 1 else []
        program = [str(ROOT / "pretrain_gpt.py"), *map(str, own)]
        if self.launcher == "usual":
            program.insert(0, str(ROOT / "bench" / "usual_start.py"))
        clean = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_LAUNCH)}
        with (run_dir / "errors").open("w") as errors:
            if self.launcher != "direct":
                commands = [(torchrun(world, *program), clean)]
            else:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", 0))
                    port = str(probe.getsockname()[1])
                place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
                commands = [
                    (
                        [sys.executable, *program],
                        {**clean, **place, "RANK": str(r), "LOCAL_RANK": str(r)},
                    )
                    for r in range(world)
                ]
            children = [
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    text=True,
                    stderr=errors,
                    stdout=errors if i else subprocess.PIPE,
                )
                for i, (command, environment) in enumerate(commands)
            ]
            loaded: list[float] = []

            def listen() -> None:
                for line in children[0].stdout or ():
                    if line.startswith("loaded "):
                        loaded.append(time.monotonic())

            listener = threading.Thread(target=listen)
            listener.start()
            codes = [child.wait(timeout=500) for child in children]
            listener.join()
        if any(codes):
            raise RuntimeError((run_dir / "errors").read_text()[-3000:])
        records = list(read_metrics(run_dir))
        shutil.rmtree(run_dir)
        at = {r["kind"]: r["m"] for r in records if r["kind"] in ("run.start", "step")}
        return loaded[0], at["run.start"], at["step"]

    def reload(self, to: Layout, **fields: Any) -> None:
        """Saves, and loads under another layout in the same processes, then takes two steps."""
        job, start = self.job, self.job.config.layout
        parts = {"save": self.save()}

        def timed(name: str, act: Callable[[], Any]) -> Any:
            begin = time.monotonic()
            result = act()
            dist.barrier()
            parts[name] = time.monotonic() - begin
            return result

        def tear_down() -> None:
            release_layout(job)
            destroy_groups()

        def build() -> tuple[Any, Any, Any]:
            groups = groups_of(config)
            model = build_model(config, groups, job.device, draw=False)
            return groups, model, build_optimizer(config, model, groups)

        root = Path(job.config.checkpoint.save)
        config = with_layout(job.config, to)
        timed("tear down", tear_down)
        groups, model, optimizer = timed("build", build)
        stored = timed("check", lambda: read_stored(root, step=None, verify=True))
        timed("load", lambda: load_weights(stored, config, model, optimizer, groups))
        timed("resume", lambda: install_layout(job, config, groups, model, optimizer))
        first, normal = self.step(), self.step()
        self.note(
            "reload",
            start,
            to,
            pause_s=sum(parts.values()),
            phases=parts,
            first_step_s=first,
            step_s=normal,
            **fields,
        )

    def go_to(self, layout: Layout) -> None:
        """Changes without measuring."""
        if self.job.config.layout != layout:
            self.mover.move(self.job, layout, self.job.state.settings)
            self.step()

    def all_changes(self, repeats: int) -> None:
        """Every ordered pair in the same processes, and bare gloo after each."""
        for repeat in range(repeats):
            for to in walk(self.layouts)[1:]:
                self.change(to, compare=True, repeat=repeat)

    def all_restarts(self, repeats: int) -> None:
        """Every ordered pair all three ways, alternating."""
        for repeat in range(repeats):
            for i, a in enumerate(self.layouts):
                for b in self.layouts[i + 1 :]:
                    self.go_to(a)
                    self.step()
                    self.change(b, repeat=repeat)
                    for to in (a, b):
                        self.restart(to, repeat=repeat)
                        self.reload(to, repeat=repeat)
                    self.change(a, repeat=repeat)

    def soak(self, changes: int, seed: int = 1) -> None:
        """Random changes with a step between, and what the processes hold after each."""
        draw, process = random.Random(seed), psutil.Process()
        for number in range(changes):
            start = self.job.config.layout
            to = draw.choice([x for x in self.layouts if x != start])
            outcome = self.mover.move(self.job, to, self.job.state.settings)
            if outcome.kind != "moved":
                raise RuntimeError(f"{start} -> {to}: {outcome.reason}")
            step_s = self.step()
            own = {
                "rss": process.memory_info().rss,
                "fds": process.num_fds(),
                "threads": process.num_threads(),
                "groups": len(dist.distributed_c10d._world.pg_map),
                "objects": len(gc.get_objects()),
            }
            ranks = all_gather_object(own)
            self.note(
                "soak",
                start,
                to,
                number=number,
                pause_s=outcome.pause_s,
                phases=outcome.phases,
                step_s=step_s,
                keys=_num_keys(),
                **{name: [of[name] for of in ranks] for name in own},
            )


def _num_keys() -> int | None:
    """Entries of the launch's store, which nothing removes by itself."""
    try:
        return int(dist.distributed_c10d._get_default_store().num_keys())
    except (RuntimeError, NotImplementedError):
        return None


def work(
    section: str, flags: list[str], *, count: int, launcher: str, output: Path, quick: bool
) -> None:
    """Runs one section on this rank; rank 0 writes its rows."""
    from megatron.training.resilience.env_checks import set_process_defaults

    set_process_defaults()
    torch.set_num_threads(1)
    folder = output.parent / section
    folder.mkdir(exist_ok=True)
    places = ["--save", folder / "checkpoints", "--run-dir", folder / "run"]
    # Only the last two checkpoints stay.
    places += ["--save-interval", 10**9, "--save-retain-interval", 10**9]
    rows: list[dict[str, Any]] = []

    def act(job: Any, mover: InProcessResharder) -> None:
        bench = Bench(job, mover, flags=flags, launcher=launcher, folder=folder)
        bench.rows = rows
        acts = {"changes": bench.all_changes, "restarts": bench.all_restarts, "soak": bench.soak}
        acts[section](count)
        if dist.get_rank() == 0:
            output.write_text(json.dumps(rows))

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    config = parse([*flags, *map(str, places)], int(os.environ["WORLD_SIZE"]))
    pretrain(config, [Measuring(act, quick=quick)])
