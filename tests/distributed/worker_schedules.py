"""Trains real text under users' own schedules, plain and with `--copus`; writes what every step had
and what was told."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from tests.helpers.jobs import TINY, evaluations_of, run, steps_of

SCHEDULES = {
    "cosine": "--lr-decay-style cosine --min-lr 1e-4 --train-iters 12 --lr-warmup-iters 3",
    "WSD": "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-samples 32 "
    "--train-samples 96 --lr-warmup-fraction 0.13 --lr-warmup-init 1e-5",
}
"""Name -> flags of a run that is made plain and observed."""
SIXTY = """--train-iters 60 --lr-warmup-iters 10 --lr-decay-style cosine --min-lr 1e-4
--adam-beta2 0.95 --weight-decay 0.1 --eval-iters 2 --eval-interval 20"""
"""What was stretched to a warm-up of 50 steps."""
RAMP = """--rampup-batch-size 2 2 24 --train-samples 96 --lr-warmup-samples 16 --min-lr 1e-4
--lr-decay-style cosine"""
SHRUNK = """--train-samples 288 --lr-warmup-samples 72 --lr-decay-style cosine --min-lr 2e-4
--adam-beta2 0.95 --weight-decay 0.1"""
SIZES = "0:8 768:2 1536:4 4608:16"
"""A batch that shrinks in the warm-up, 24 samples after its start, and grows later."""
EXACT = "--rampup-batch-size 2 2 24 --train-iters 9 --lr-warmup-iters 4 --lr-decay-style linear"


def controller(**flags: Any) -> Any:
    """A controller whose decisions do not rest on how busy this machine is."""
    from dataclasses import replace

    from copus_ext.controller.callback import Controller
    from copus_ext.controller.flags import CopusConfig

    class Steady(Controller):
        def on_train_step_end(self, context: Any) -> Any:
            assert context.step is not None
            elapsed_s = 0.02 + 0.001 * context.step.global_batch_size
            context.step = replace(context.step, elapsed_s=elapsed_s, end_s=0.02)
            return super().on_train_step_end(context)

    return Steady(CopusConfig(copus=True, **flags))


def main(output: Path) -> Any:
    """Returns the steps, the evaluations and the lines of every run."""
    import torch.distributed as dist

    from copus_ext.monitor.time_saved import line_at_end

    base = f"{TINY} --split 90,10,0"
    results: dict[str, Any] = {}

    def go(name: str, flags: str | list[str], *own: Any) -> None:
        folder, out = output / name.replace(" ", "_"), io.StringIO()
        words = flags.split() if isinstance(flags, str) else flags
        run(words, folder, own, base=base, out=out)
        if dist.get_rank() == 0:
            names = ("consumed_samples", "global_batch_size", "learning_rate")
            results[name] = {
                "steps": [
                    {**{n: s[n] for n in names}, "loss": s["losses"]["lm loss"]}
                    for s in steps_of(folder)
                ],
                "evaluations": evaluations_of(folder),
                "told": out.getvalue().splitlines(),
                "saved": line_at_end(folder) if own else "",
            }

    for name, flags in SCHEDULES.items():
        go(name, flags)
        go(f"{name} observed", flags, controller(copus_mode="observe"))
    go("sixty", SIXTY)
    go("sixty acting", SIXTY, controller())
    go("sixty kept", SIXTY, controller(copus_policy="static"))
    schedule = f"{SHRUNK} --global-batch-size 16 --step-batch-size-schedule".split()
    go("shrunk", [*schedule, SIZES], controller(copus_policy="step_schedule"))
    save = f"--save {output / 'ramp-saved'} --save-interval 3"
    go("ramp", f"{RAMP} {save}")
    go("ramp observed", RAMP, controller(copus_mode="observe"))
    load = f"--load {output / 'ramp-saved'} --ckpt-step 6"
    go("ramp resumed observed", f"{RAMP} {load}", controller(copus_mode="observe"))
    go("ramp resumed acting", f"{RAMP} {load}", controller())
    save = f"--save {output / 'act-saved'} --save-interval 6"
    go("ramp acting", f"{RAMP} {save}", controller())
    load = f"--load {output / 'act-saved'} --ckpt-step 6"
    go("ramp acting resumed", f"{RAMP} {load}", controller())
    go("exact", EXACT)
    go("lengths", f"{SCHEDULES['cosine']} --save {output / 'saved'} --exit-interval 4")
    load = f"--load {output / 'saved'} --global-batch-size 16"
    go("lengths resumed", f"{SCHEDULES['cosine']} {load}")
    return results
