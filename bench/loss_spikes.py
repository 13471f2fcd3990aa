"""How often does the scatter of losses pass for a spike, and how often is one missed?

    python -m bench.loss_spikes

The job of the scenario S3 trains on one rank with static batches, on real text. Every tenth step
counts as a change of the batch, so that any spike found there is a false one. Then a rise that dies
out over ten steps is added to the losses after it. `rule` is what COPUS does. The other two are
what it might do with a single loss. Writes docs/results/loss_spikes.json.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.support import TRAINER, arguments, launch, make_dataset, origin, read_run, write
from bench.time_to_loss.real_clock import Spec, flags_of
from bench.time_to_loss.real_clock_scenarios import NO_LIMIT, S3
from copus_ext.goodput.loss_watch import WATCHED_STEPS, LossWatch
from copus_ext.goodput.state import TIMED_STEPS

FILE = "loss_spikes.json"
BATCHES = (2, 4, 8)
RISES = (0.0, 0.5, 1.0, 2.0)
"""Of the first step after a change, nats; 0 is an ordinary run."""
EVERY = 10


def losses_of(batch: int, data_path: str, folder: Path) -> list[float]:
    """Trains with a static batch; the loss of each step."""
    spec = Spec(
        scenario=S3.name,
        kind="static",
        batch=batch,
        link=NO_LIMIT,
        seed=1,
        warmup=0.3,
        layout=S3.static_layout,
        micro_batch=min(batch, 8),
    )
    own = ["--eval-iters", "0", "--data-path", data_path, "--run-dir", folder]
    launch(1, TRAINER, *flags_of(S3, spec), *own)
    return [step["losses"]["lm loss"] for step in read_run(folder).steps]


def verdicts(before: Sequence[float], after: Sequence[float], batch: int) -> dict[str, bool]:
    """By rule, whether it finds a spike in the losses after a change."""
    mean, sd = statistics.fmean(before), statistics.stdev(before)
    watch = LossWatch(
        decision=1,
        from_batch=batch,
        to_batch=batch,
        loss_before=mean,
        loss_sd_before=sd,
        num_losses_before=len(before),
    )
    for loss in after:
        watch.add(loss)
    rise = max(after) - mean
    return {
        "rule": watch.has_spiked,
        "one loss, 0.5 nats": rise > 0.5,
        "one loss, 6 sd": rise > 6 * sd,
    }


def shares(losses: Sequence[float], batch: int) -> dict[str, dict[str, float]]:
    """By rise and rule, the share of changes at which it finds a spike."""
    found: dict[str, dict[str, float]] = {}
    for rise in RISES:
        rows = []
        for at in range(TIMED_STEPS, len(losses) - WATCHED_STEPS, EVERY):
            after = losses[at : at + WATCHED_STEPS]
            raised = [loss + rise * math.exp(-i / 10) for i, loss in enumerate(after)]
            rows.append(verdicts(losses[at - TIMED_STEPS : at], raised, batch))
        means = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
        found[f"rise {rise:g}"] = {name: round(share, 4) for name, share in means.items()}
    return found


def main() -> None:
    """Trains, prints and writes."""
    args = arguments(__doc__, FILE).parse_args()
    result: dict[str, Any] = {"origin": origin(), "batches": {}}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data_path = make_dataset(folder / "stdlib")
        for batch in BATCHES:
            losses = losses_of(batch, data_path, folder / str(batch))
            result["batches"][str(batch)] = {
                "changes": len(range(TIMED_STEPS, len(losses) - WATCHED_STEPS, EVERY)),
                "last_sd": round(statistics.stdev(losses[-100:]), 4),
                "spikes": shares(losses, batch),
            }
            print(f"batch {batch}: {result['batches'][str(batch)]}", flush=True)
    write(args.output, result)


if __name__ == "__main__":
    main()
