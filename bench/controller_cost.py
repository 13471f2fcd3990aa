"""What does the controller cost per step between decisions?

    python bench/controller_cost.py

Times the controller's part of every step of a small run, the measurement of the noise scale (B2)
and decisions left out, and compares it with the steps of docs/results/act_run.json. Writes
docs/results/controller_cost.json.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import RESULTS, open_source, origin

FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32
--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
--train-samples 8000 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --eval-iters 0
--log-interval 1000 --hidden-dropout 0 --attention-dropout 0 --adam-beta2 0.95"""


def timed_run(folder: Path) -> dict[str, list[float]]:
    """Seconds of the controller's part of every step, of the noise scale's and of decisions."""
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
            watch = self.watch.on_train_step_end
            self.watch.on_train_step_end = lambda c: self._aside(watch, c)  # type: ignore[method-assign]

        def _aside(self, action: Any, *args: Any) -> Any:
            start = time.perf_counter()
            result = action(*args)
            self._others += time.perf_counter() - start
            return result

        def _decide(self, context: Any) -> Any:
            start = time.perf_counter()
            result = super()._decide(context)
            spent["decide"].append(time.perf_counter() - start)
            self._others += spent["decide"][-1]
            return result

        def on_train_step_end(self, context: Any) -> Any:
            self._others, start = 0.0, time.perf_counter()
            request = super().on_train_step_end(context)
            spent["own"].append(time.perf_counter() - start - self._others)
            return request

    config = resolve(parse_args([*FLAGS.split(), "--run-dir", str(folder)]), 1)
    with contextlib.redirect_stdout(io.StringIO()):
        pretrain(config, [Timed()])
    return spent


def main() -> int:
    """Runs, prints and writes."""
    open_source()
    os.environ.setdefault("MASTER_PORT", "0")
    with tempfile.TemporaryDirectory() as folder:
        spent = timed_run(Path(folder) / "run")
    run = json.loads((RESULTS / "act_run.json").read_text())
    step_s = run["seconds_of_steps"] / len(run["curves"]["samples"])
    median = statistics.median(spent["own"])
    result = {
        "what": "seconds of the controller per step, noise measurement and decisions left out",
        "steps": len(spent["own"]),
        "median_s": median,
        "mean_s": statistics.fmean(spent["own"]),
        "decisions": len(spent["decide"]),
        "median_decision_s": statistics.median(spent["decide"]),
        "mean_step_of_act_run_s": step_s,
        "share_of_that_step": statistics.fmean(spent["own"]) / step_s,
        **origin(),
    }
    (RESULTS / "controller_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
