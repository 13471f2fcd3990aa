"""Trains two stages under a controller that tests the learning rate."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import TINY, layout_flags, run, steps_of

FLAGS = """--train-samples 3200 --eval-iters 2 --eval-interval 1000 --lr-decay-style constant
--lr-warmup-samples 8 --use-distributed-optimizer --lr 5e-3"""
BATCH = 8
WARM_UP, TESTED, AFTER = 128, 56, 80
"""Steps of the warm-up, before the save behind the test, and of the run with a test: a decision
comes after the save."""
PLACE = (0.25, 0.9)
"""Of the warm-up, where the test may begin: at that decision, too."""


def main(output: Path) -> Any:
    """Returns what every run did."""
    import torch.distributed as dist

    from copus_ext.controller import rules
    from copus_ext.controller.callback import Controller
    from copus_ext.controller.decision_log import NAME, read_journal
    from copus_ext.controller.flags import CopusConfig
    from copus_ext.goodput import rate_rule
    from megatron.training.train.callbacks import CallbackContext

    class Noting(Controller):
        """Also keeps what every rank came to."""

        def on_train_end(self, context: CallbackContext) -> None:
            super().on_train_end(context)
            state = context.state.to_json()
            self.found = [state["callbacks"]["copus_control"], state["settings"]]

    settings: dict[str, Any] = {"copus_policy": "static", "copus_max_micro_batch_size": 1}
    settings |= {"copus_gns_interval": 4}
    results: dict[str, Any] = {}

    def record(name: str, more: list[str], **flags: Any) -> None:
        where, out = output / name, io.StringIO()
        controller = Noting(CopusConfig(copus=True, **settings, **flags)) if flags else None
        every = [*layout_flags(1, 2, 1), *FLAGS.split(), *more]
        run(every, where, [controller] if controller else [], base=TINY, out=out)
        found: list[Any] = [None] * dist.get_world_size()
        own = json.dumps(controller and controller.found)
        dist.all_gather_object(found, own)
        if dist.get_rank() == 0:
            results[name] = {
                "losses": {s["iteration"]: s["losses"]["lm loss"] for s in steps_of(where)},
                "journal": list(read_journal(where / NAME)) if controller else [],
                "states": found,
                "out": out.getvalue(),
            }

    warming = ["--lr-warmup-samples", str(WARM_UP * BATCH), "--exit-interval", str(AFTER)]
    save = ["--save", str(output / "tested"), "--save-interval", str(TESTED)]
    load = ["--load", str(output / "tested"), "--ckpt-step", str(TESTED)]
    record("plain warming", warming)
    with (
        patch.object(rules, "LEAST_WARM_UP_STEPS", WARM_UP),
        patch.object(rate_rule, "MIN_STEPS", 4),
        patch.object(rate_rule, "SHARE", 1 / 12),
        patch.object(rate_rule, "PLACE", PLACE),
    ):
        record("tested", [*warming, *save], copus_lr_test="warn")
        record("tested, resumed", [*warming, *load], copus_lr_test="warn")
    return results
