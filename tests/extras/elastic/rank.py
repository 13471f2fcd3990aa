"""A rank of `runs.py`: trains, and kills itself or its node where the plan says so.

The plan is a JSON file that `COPUS_KILL_PLAN` names: {"kills": [{"number", "step", "moment",
"victim": [node, local], "what"}]}. Each kill happens once; the rank writes `kill-<number>` beside
the plan, with the time, the step and its command line, before it acts. `pause_s` more seconds go by
in each step after `pause_from`, with `ranks` only while there are fewer, so that those that come
again find the others at work. With `move_every` the run changes its layout in the running processes
every so many steps. `requests` asks for a number of ranks at a step, each once.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from copus_ext.commands import pretrain
from copus_ext.controller.decision_log import DecisionLog
from copus_ext.controller.flags import CopusConfig
from copus_ext.controller.layout_changes import LayoutChange, LayoutChangeManager
from copus_ext.extras.elastic import copies, recover
from copus_ext.extras.elastic.resize import RANKS_FILE
from copus_ext.goodput.state import ControllerState
from copus_ext.launch.layout_fit import layouts_for
from copus_ext.reshard import change
from megatron.trainer.checkpoint.save import Checkpointer
from megatron.trainer.common.step_settings import Request
from megatron.trainer.config.layout import Layout
from megatron.trainer.train import loop, step
from megatron.trainer.train.callbacks import Callback, CallbackContext

_PLAN = Path(os.environ["COPUS_KILL_PLAN"])
_GIVEN = json.loads(_PLAN.read_text())
_KILLS = _GIVEN["kills"]
_PAUSE_FROM, _PAUSE_S = _GIVEN.get("pause_from", 0), _GIVEN.get("pause_s", 0.0)
_MOVE_EVERY = _GIVEN.get("move_every", 0)
_STEP = [0]


def _mine(moment: str) -> dict[str, Any] | None:
    """The kill that is due at a moment on this rank."""
    place = [int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])]
    for kill in _KILLS:
        if kill["moment"] != moment or kill["victim"] != place or kill["step"] > _STEP[0]:
            continue
        if _has_happened(kill["number"]):
            continue
        if kill.get("after") is not None and not _has_happened(kill["after"]):
            continue
        return kill
    return None


def _has_happened(number: int) -> bool:
    return (_PLAN.parent / f"kill-{number}").exists()


def _fault(moment: str) -> None:
    if (kill := _mine(moment)) is not None:
        _act(kill)


def _ask_for_ranks() -> None:
    for request in _GIVEN.get("requests", ()):
        path = _PLAN.parent / f"asked-{request['number']}"
        if dist.get_rank() == 0 and _STEP[0] >= request["step"] and not path.exists():
            path.touch()
            (_PLAN.parent / "run" / RANKS_FILE).write_text(f"{request['ranks']}\n")


def _act(kill: dict[str, Any]) -> None:
    path = _PLAN.parent / f"kill-{kill['number']}"
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    launcher = psutil.Process(os.getppid())
    supervisor = launcher.parent()
    ranks = [p for p in launcher.children() if p.pid != os.getpid()]
    node = [*([supervisor] if supervisor is not None else []), launcher, *ranks]
    happened = {"t": time.time(), "iteration": _STEP[0], "argv": sys.argv}
    os.write(handle, json.dumps(happened).encode())
    os.close(handle)
    if kill["what"] == "frozen node":
        pids = [str(p.pid) for p in node] + [str(os.getpid())]
        script = f"sleep {kill['seconds']}; kill -CONT {' '.join(pids)} 2>/dev/null"
        subprocess.Popen(["sh", "-c", script], start_new_session=True)
        for pid in pids:
            os.kill(int(pid), signal.SIGSTOP)
        return
    if kill["what"] == "node":
        for process in node:
            process.kill()
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, moment: str) -> None:
    """Lets a function begin with a fault."""
    plain = getattr(owner, name)

    def faulty(*args: Any, **named: Any) -> Any:
        _fault(moment)
        return plain(*args, **named)

    setattr(owner, name, faulty)


def _watch_steps() -> None:
    plain = loop.train_step

    def watched(job: Any) -> Any:
        _STEP[0] = job.state.iteration
        if _STEP[0] > _PAUSE_FROM and dist.get_world_size() < _GIVEN.get("ranks", math.inf):
            time.sleep(_PAUSE_S)
        _ask_for_ranks()
        if (kill := _mine("any time")) is not None:
            delay_s = random.Random(kill["number"]).random() * kill["seconds"]
            threading.Timer(delay_s, _act, [kill]).start()
        return plain(job)

    loop.train_step = watched


class _Moves(Callback):
    """Takes the run to one layout after another, every `_MOVE_EVERY` steps."""

    def __init__(self) -> None:
        flags = CopusConfig(copus_relayout="inprocess")
        state, log = ControllerState(), DecisionLog(None)
        self._changes = LayoutChangeManager(flags, state, log, prior_s=lambda layout: 1.0)

    def on_setup_start(self, context: CallbackContext) -> None:
        """Makes ready for changes."""
        self._changes.open(context)

    def on_train_step_end(self, context: CallbackContext) -> Request | None:
        """Asks for the next layout, if one is due and another is legal."""
        iteration = context.state.iteration
        others = [one for one in _legal(context) if one != context.config.layout]
        if iteration % _MOVE_EVERY or not others:
            return None
        wanted = LayoutChange(
            number=None,
            to=others[iteration // _MOVE_EVERY % len(others)],
            settings=context.state.settings,
            reason="the campaign moves",
            done=lambda outcome: print(f"moved: {outcome.kind} {outcome.reason}", flush=True),
        )
        return self._changes.request(wanted, context)

    def on_train_end(self, context: CallbackContext) -> None:
        self._changes.close(context)


def _legal(context: CallbackContext) -> list[Layout]:
    """Layouts of the world that cut the batch and the four layers and heads."""
    batch, now = context.config.batch, context.config.layout
    return [
        one
        for one in layouts_for(now.world_size, now)
        if batch.global_batch_size % (one.dp * batch.micro_batch_size) == 0
        and 4 % one.tp == 0
        and 4 % one.pp == 0
    ]


def _with_moves() -> None:
    """Adds the changes of layout to the callbacks of the program."""
    plain = pretrain.controllers
    pretrain.controllers = lambda args, config: [*plain(args, config), _Moves()]


def main() -> int:
    if _MOVE_EVERY:
        _with_moves()
    _watch_steps()
    _before(step, "forward_step", "compute")
    _before(step, "share_numbers", "after the optimizer")
    _before(step, "optimizer_step", "optimizer")
    _before(copies.PeerCopies, "_exchange", "copy")
    _before(Checkpointer, "_commit", "save")
    _before(loop, "_evaluate", "evaluation")
    _before(recover, "_restore", "recovery")
    _before(change.Change, "_build", "move")
    return pretrain.main()


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(exit_code)
