"""Trains under the controller in several ways."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.jobs import run, steps_of

if TYPE_CHECKING:
    from megatron.trainer.common.step_settings import Request
    from megatron.trainer.train.callbacks import CallbackContext

BASE = ["--lr-decay-style", "constant", "--lr-warmup-samples", "16", "--weight-decay", "0.1"]
BASE += ["--adam-beta2", "0.9", "--train-samples", "360"]
DOUBLING = {
    "copus_policy": "doubling",
    "copus_doubling_first_tokens": 64 * 32.0,
    "copus_doubling_ratio": 2.0,
    "copus_max_micro_batch_size": 1,
    "copus_lr_ramp_steps": 10,
}
"""Doubles after 64, 128 and 256 samples, whatever the machine's speed."""


SHRINKING = {"copus_policy": "step_schedule"}
SHRINKS = ["--step-batch-size-schedule", "0:32 4K:8 6.4K:32", "--global-batch-size", "32"]
SHRINKS += ["--lr-warmup-samples", "200"]
"""Takes 4 steps of 32, 9 of 8, then 32 again, while the learning rate warms up over 200 samples."""


def controllers() -> tuple[Any, Any, Any, Any]:
    """The class of a controller that can be looked into, of two with a bug, and of one that meets a
    state of another version; what it imports is only there in the processes of a run."""
    from copus_ext.controller.callback import Controller
    from copus_ext.controller.flags import CopusConfig

    class Noting(Controller):
        """Also keeps what every rank came to."""

        def __init__(self, **flags: Any) -> None:
            super().__init__(CopusConfig(copus=True, **flags))
            self.states: list[str] = []

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            # What is decided must not rest on how busy this machine is.
            assert context.step is not None and context.step.end_s is not None
            assert 0.0 < context.step.end_s < context.step.elapsed_s
            elapsed_s = 0.02 + 0.001 * context.step.global_batch_size
            context.step = replace(context.step, elapsed_s=elapsed_s, end_s=0.02)
            return super().on_train_step_end(context)

        def on_train_end(self, context: CallbackContext) -> None:
            super().on_train_end(context)
            self.states.append(json.dumps(context.state.to_json()["callbacks"]["copus_control"]))

    class Failing(Noting):
        """Has a bug that shows on rank 0 at the first decision in a ramp."""

        def _inputs(self, context: CallbackContext) -> Any:
            if self.state.ramp is not None:
                raise ZeroDivisionError("a bug")
            return super()._inputs(context)

    class Unable(Noting):
        """Has a bug that shows on rank 0 when it is set up."""

        def _open_table(self, context: CallbackContext) -> Any:
            raise LookupError("no such package")

    class Foreign(Noting):
        """Finds a state of another version in the checkpoint."""

        def _restore(self, context: CallbackContext) -> None:
            context.state.callbacks["copus_control"]["version"] = 0
            super()._restore(context)

    return Noting, Failing, Unable, Foreign


_FIELDS = ("iteration", "consumed_samples", "global_batch_size", "micro_batch_size")
_FIELDS += ("learning_rate", "grad_norm")


class Recorder:
    """Runs jobs one after the other and keeps what each did.

    Args:
        output: folder of the runs.
        base: flags of all of them.
    """

    def __init__(self, output: Path, base: list[str]) -> None:
        self.output, self.base = output, base
        self.results: dict[str, Any] = {}

    def __call__(self, name: str, more: list[str], controller: Any = None) -> None:
        """One run, whose name is that of its folder."""
        import torch.distributed as dist

        from copus_ext.controller.decision_log import NAME, read_journal

        where = self.output / name
        out = io.StringIO()
        run([*self.base, *more], where, [controller] if controller else [], out=out)
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, controller.states if controller else [])
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, out.getvalue())
        if dist.get_rank() == 0:
            journal = list(read_journal(where / NAME)) if (where / NAME).exists() else []
            self.results[name] = {
                "steps": [
                    {k: s[k] for k in _FIELDS} | {"loss": s["losses"]["lm loss"]}
                    for s in steps_of(where)
                ],
                "journal": journal,
                "states": states,
                "told": "".join(told).splitlines(),
            }


def main(output: Path) -> Any:
    import torch.distributed as dist

    from megatron.trainer.common.errors import TrainingFailure

    noting, failing, unable, foreign = controllers()
    record = Recorder(output, BASE)
    save = ["--save", str(output / "saved"), "--save-interval", "5"]
    record("doubling", [*save, "--log-interval", "1"], noting(**DOUBLING))
    load = ["--load", str(output / "saved"), "--ckpt-step", "10"]
    # By step 15 the outcome of the first change is known.
    record("resumed", [*load, "--ckpt-step", "15"], noting(**DOUBLING))
    record("another version", [*load, "--exit-interval", "12"], foreign(**DOUBLING))
    record("narrowed", load, noting(**DOUBLING, copus_max_global_batch_size=8))
    saved = ["--save", str(output / "shrunk saved"), "--save-interval", "8"]
    record("shrunk", [*SHRINKS, *saved], noting(**SHRINKING))
    saved = ["--load", str(output / "shrunk saved"), "--ckpt-step", "8"]
    record("shrunk resumed", [*SHRINKS, *saved], noting(**SHRINKING))
    record("plain", [])
    # A run of 360 samples is early to its end.
    eager = {"copus_noise_scale_multiplier": 1e3}
    observe = {"copus_mode": "observe", **eager}
    record("observed", ["--log-interval", "1"], noting(**observe))
    record("adaptive", [], noting(**eager, copus_max_global_batch_size=64))
    annealing = {"copus_anneal_by_batch": 0.5, "copus_max_micro_batch_size": 1}
    keep = ["--save", str(output / "annealed saved"), "--save-interval", "3"]
    record("annealed", keep, noting(**annealing, copus_max_global_batch_size=64))
    begun = [
        i for i, s in enumerate(steps_of(output / "annealed"), 1) if s["consumed_samples"] > 180
    ]
    middle = next(i for i in begun if i % 3 == 0)
    keep = ["--load", str(output / "annealed saved"), "--ckpt-step", str(middle)]
    record("annealed resumed", keep, noting(**annealing, copus_max_global_batch_size=64))
    record("paper", [], noting(copus_policy="copus", copus_noise_scale_multiplier=1e3))
    if dist.get_rank() == 0:
        (output / "paused" / "control").mkdir(parents=True)
        (output / "paused" / "control" / "pause").touch()
    dist.barrier()
    record("paused", ["--exit-interval", "20"], noting(**DOUBLING))
    record("failed", [], failing(**DOUBLING))
    record("resumed plain", [*load, "--exit-interval", "14"])
    # At last, as it leaves the groups of its job.
    ends = [None] * dist.get_world_size()
    try:
        record("unable", [], unable(**DOUBLING))
    except TrainingFailure as failure:
        dist.all_gather_object(ends, str(failure))
    return {**record.results, "unable": ends}
