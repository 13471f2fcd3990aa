"""What do shorter gradients and clipped groups of samples do to a step, and to the loss?

    sudo python -m bench.grad_options

Two nodes (network namespaces) with a core and a rank each, data parallelism. First gradients as two
factors (`--grad-compression-rank`): seconds of a step of the quickstart's model over 200 Mbit/s,
with and without the distributed optimizer. Then `--clip-group-size`: steps of that model without
limit on the link, in turn with steps without it. Last the loss with short gradients: S4's model
over 100 Mbit/s (`real_clock.py`), with the rate that is best for whole ones. Writes
docs/results/grad_options.json in 20 minutes, after each part and each seed. It needs root,
iproute2, two cores and nothing else running.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import nodes
from bench.nodes import Nodes
from bench.stage_messages import compared
from bench.support import (
    QUICKSTART_MODEL,
    TRAINER,
    RunRecord,
    arguments,
    make_dataset,
    origin,
    read_run,
    write,
)
from bench.time_to_loss.kfac_trainer import adams_best
from bench.time_to_loss.real_clock import flags_of
from bench.time_to_loss.real_clock_scenarios import S4

RANK, SEEDS, BATCH = 8, (1, 2, 3), 32
SHORT = ["--grad-compression-rank", str(RANK)]
CLIP = ["--clip-group-size", "8", "--clip-group-norm", "1.0"]
_STEPS, _WARM_UP, _TURNS, _CLIP_STEPS = 10, 2, 3, 20
_SLOW_MBIT, _USUAL_MBIT, _NO_LIMIT = 200.0, 100.0, 0.0
_ZERO = "--use-distributed-optimizer"


class Trainer:
    """Runs the trainer on two nodes.

    Args:
        work: folder for runs and data.
    """

    def __init__(self, work: Path) -> None:
        self._work = work
        self._data = ["--data-path", make_dataset(work / "stdlib")]
        self._data += ["--data-cache-path", str(work / "cache")]
        self._count = 0

    def run(self, site: Nodes, flags: list[str]) -> RunRecord:
        """A finished run."""
        self._count += 1
        folder = self._work / f"run{self._count}"
        command = [TRAINER, *flags, *self._data, "--run-dir", str(folder)]
        site.run(command, self._work / "log")
        return read_run(folder)

    def step_s(self, site: Nodes, flags: list[str], steps: int, *, sharded: bool = True) -> float:
        """The median of the quickstart's model with some flags."""
        model = QUICKSTART_MODEL if sharded else QUICKSTART_MODEL.replace(_ZERO, "")
        own = ["--lr", "1e-3", "--split", "98,1,1", "--train-iters", str(steps + _WARM_UP)]
        own += ["--log-interval", "1000", "--micro-batch-size", "4", "--global-batch-size", "16"]
        record = self.run(site, [*model.split(), *own, *flags])
        return statistics.median(step["seconds"] for step in record.steps[_WARM_UP:])


def short_steps(trainer: Trainer) -> list[dict[str, Any]]:
    """Seconds of a step with whole and with short gradients."""
    rows = []
    with nodes.two_nodes(_SLOW_MBIT) as site:
        for sharded in (True, False):
            whole, short = (
                trainer.step_s(site, way, _STEPS, sharded=sharded) for way in ([], SHORT)
            )
            row = {"distributed_optimizer": sharded, "whole_s": whole, "short_s": short}
            rows.append({**row, "times_as_fast": whole / short})
            print(rows[-1], flush=True)
    return rows


def losses(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """When short gradients reach the loss at which whole ones end, seed by seed. Short ones exclude
    that the reduction overlaps with the backward pass; whole ones have it."""
    spec = adams_best(BATCH)
    with nodes.two_nodes(_USUAL_MBIT) as site:
        for seed in SEEDS:
            flags = [*flags_of(S4, spec), "--seed", str(seed)]
            late = [word for word in flags if not word.startswith("--overlap-")] + SHORT
            ways = [flags, late] if seed % 2 else [late, flags]
            found = {way is late: trainer.run(site, way) for way in ways}
            yield compared(seed, found[False], found[True])


def clipping(trainer: Trainer) -> dict[str, Any]:
    """Seconds of a step with and without groups, in turn."""
    pairs = []
    with nodes.two_nodes(_NO_LIMIT) as site:
        for _ in range(_TURNS):
            plain, clipped = (trainer.step_s(site, way, _CLIP_STEPS) for way in ([], CLIP))
            pairs.append([plain, clipped])
            print(pairs[-1], flush=True)
    more = [clipped / plain - 1 for plain, clipped in pairs]
    return {"seconds": pairs, "more": statistics.median(more), "more_of_turns": more}


def main() -> None:
    """Measures, prints and writes."""
    parser = arguments(__doc__, "grad_options.json")
    parser.add_argument("--only-losses", action="store_true", help="keep the rest of --output")
    args = parser.parse_args()
    nodes.require()
    what = "gradients as two factors, and groups of samples that are clipped"
    result: dict[str, Any] = {"what": what, "rank": RANK, **origin()}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(Path(folder))
        if args.only_losses:
            result = json.loads(args.output.read_text())
        else:
            result |= {"steps": short_steps(trainer), "clipping": clipping(trainer)}
            write(args.output, result)
        result["losses"] = []
        for row in losses(trainer):
            # A killed command leaves the seeds that are done.
            result["losses"].append(row)
            write(args.output, result, hide=["losses"])
            print(row["last_losses"], row["times_faster"], flush=True)


if __name__ == "__main__":
    main()
