"""Do fork tests that measure the noise scale multiplier save more time than they take?

    python -m bench.time_to_loss.fork_tests [--lengths 1,10] [--true 2,8,16] [--first-batch 32]
        [--seed 0]

The controller assumes the shipped multiplier; progress has another one. Prints time to the last
loss over the best static batch: without tests, with them, and with the true multiplier known at no
cost. A run of ten times the length has its targets at ten times the progress and goes on along the
same power law of the noise scale.
"""

from __future__ import annotations

import argparse
import dataclasses
import math

from bench.time_to_loss.scenarios import MEASURING, clusters, static_seconds
from copus_ext.controller.flags import NOISE_SCALE_MULTIPLIER
from copus_ext.goodput.fork_rule import LOSS_SD
from copus_ext.simulate.contenders import Contender, contenders
from copus_ext.simulate.run import Run, simulate
from copus_ext.simulate.scenario import Scenario, preset


def longer(s: Scenario, times: int) -> Scenario:
    """A run of so many times the length."""
    targets = {name: times * progress for name, progress in s.targets.items()}
    total = times * s.total_samples
    return s.change(total_samples=total, targets=targets, average_error=LOSS_SD)


def one(
    s: Scenario, first_batch: int, multiplier: float, *, seed: int, tests: bool
) -> tuple[float, Run]:
    """Time over the best static batch, and the run."""
    flags = contenders(s.batches)["adaptive_goodput_forward"].flags
    assert flags is not None
    flags = dataclasses.replace(
        flags,
        copus_reference_batch_size=s.batches[0],
        copus_noise_scale_multiplier=multiplier,
    )
    who = Contender(name="copus", flags=flags, first_batch=first_batch, fork_tests=tests)
    run = simulate(s, who, seed=seed)
    time_s = run.times_s[max(s.targets, key=s.targets.__getitem__)]
    reached = math.inf if time_s is None else time_s + run.measured_s * MEASURING
    return reached / min(static_seconds(s).values()), run


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="1,10")
    parser.add_argument("--true", default="2,8,16")
    parser.add_argument("--first-batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in clusters():
        for times in map(int, args.lengths.split(",")):
            for true in map(float, args.true.split(",")):
                s = longer(preset(name), times).recalibrated(true)
                off, _ = one(
                    s, args.first_batch, NOISE_SCALE_MULTIPLIER, seed=args.seed, tests=False
                )
                auto, run = one(
                    s, args.first_batch, NOISE_SCALE_MULTIPLIER, seed=args.seed, tests=True
                )
                perfect, _ = one(s, args.first_batch, true, seed=args.seed, tests=False)
                print(
                    f"{name} x{times}, c {true:g}: off {off:.4f}, auto {auto:.4f}, perfect "
                    f"{perfect:.4f}; {len(run.fork_tests)} tests took "
                    f"{100 * run.forked_s / run.seconds:.2f} %",
                    flush=True,
                )


if __name__ == "__main__":
    main()
