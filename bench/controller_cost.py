"""What does the controller cost per step between decisions?

    python -m bench.controller_cost

Times the controller's part of every step of a small run, the measurement of the noise scale and
decisions left out, and compares it with the steps of docs/results/act_run.json. Writes
docs/results/controller_cost.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.support import RESULTS, arguments, origin, write

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --eval-iters 0
--log-interval 1000 --hidden-dropout 0 --attention-dropout 0 --adam-beta2 0.95"""


def timed_run(folder: Path, samples: int) -> dict[str, list[float]]:
    """Seconds of the controller's part of every step, and of its decisions."""
    from copus_ext.controller.callback import Controller
    from copus_ext.controller.flags import CopusConfig
    from megatron.training.config.arguments import parse_args, resolve
    from megatron.training.train.pretrain import pretrain

    spent: dict[str, list[float]] = {"own": [], "decide": []}

    class Timed(Controller):
        """Knows how long it takes."""

        def __init__(self) -> None:
            super().__init__(CopusConfig(copus=True))
            self._others = 0.0
            measure = self.gns.on_train_step_end
            self.gns.on_train_step_end = lambda c: self._aside(measure, c)  # type: ignore[method-assign]

        def _aside(self, action: Any, *args: Any) -> Any:
            start = time.perf_counter()
            result = action(*args)
            self._others += time.perf_counter() - start
            return result

        def _decide(self, context: Any) -> Any:
            before = self._others
            result = self._aside(super()._decide, context)
            spent["decide"].append(self._others - before)
            return result

        def on_train_step_end(self, context: Any) -> Any:
            self._others, start = 0.0, time.perf_counter()
            request = super().on_train_step_end(context)
            spent["own"].append(time.perf_counter() - start - self._others)
            return request

    flags = [*FLAGS.split(), "--train-samples", str(samples), "--run-dir", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(resolve(parse_args(flags), 1), [Timed()])
    return spent


def main() -> None:
    """Runs, prints and writes."""
    parser = arguments(__doc__, "controller_cost.json")
    parser.add_argument("--samples", type=int, default=8000)
    args = parser.parse_args()
    os.environ.setdefault("MASTER_PORT", "0")
    with tempfile.TemporaryDirectory() as folder:
        spent = timed_run(Path(folder) / "run", args.samples)
    run = json.loads((RESULTS / "act_run.json").read_text())
    step_s = run["seconds_of_steps"] / len(run["curves"]["samples"])
    result = {
        "what": "seconds of the controller per step, noise measurement and decisions left out",
        "steps": len(spent["own"]),
        "median_s": statistics.median(spent["own"]),
        "mean_s": statistics.fmean(spent["own"]),
        "decisions": len(spent["decide"]),
        "median_decision_s": statistics.median(spent["decide"]),
        "mean_step_of_act_run_s": step_s,
        "share_of_that_step": statistics.fmean(spent["own"]) / step_s,
        **origin(),
    }
    write(args.output, result)


if __name__ == "__main__":
    main()
