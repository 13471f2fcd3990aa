"""Steps become slower on two ranks that count as two nodes; the controller times links again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any


def main(folder: Path) -> Any:
    """Returns what every rank timed and what it then knew."""
    import torch.distributed as dist

    from copus_ext.controller.conditions_check import have_conditions_changed
    from copus_ext.controller.decision_log import DecisionLog
    from copus_ext.controller.link_timing import link_of, time_machine
    from copus_ext.controller.throughput_table import ThroughputTable
    from copus_ext.goodput.conditions import Conditions
    from copus_ext.goodput.state import ControllerState
    from megatron.trainer.common.collectives import all_gather_object
    from tests.unit.test_controller_parts import config, flags

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    run, state, is_first = config(), ControllerState(), dist.get_rank() == 0
    timings = time_machine("cpu")
    link = link_of(timings, run)
    assert link is not None
    state.conditions = Conditions(usual=timings)
    table = ThroughputTable(run, flags(), gpu=None, link=link) if is_first else None
    log, key = DecisionLog(folder if is_first else None), "tp1.pp1.dp2 1 8"
    changed = []
    for i in range(80):
        seconds = 1.0 if i < 45 else 2.0
        state.record_step(key=key, consumed_samples=i, batch=8, loss=1.0, seconds=seconds)
        if have_conditions_changed(state, table, log, key=key, iteration=i, device="cpu"):
            changed.append(i)
    known = {
        "changed": changed,
        "usual": asdict(timings),
        "link": link.bytes_per_s,
        "state": json.dumps(state.to_json()),
    }
    return all_gather_object(known)
