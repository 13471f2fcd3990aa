"""Trains under a controller that changes the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.distributed.worker_controller import Recorder
from tests.helpers.jobs import TINY

BASE = ["--lr-decay-style", "constant", "--lr-warmup-samples", "8", "--weight-decay", "0.1"]
BASE += ["--adam-beta2", "0.9", "--train-samples", "240", "--use-distributed-optimizer"]
TRACED = ["--profile", "--profile-step-start", "6", "--profile-step-end", "10"]
"""Around the first decision."""


def write_profile(
    path: Path, world_size: int, *, gpu: str | None = None, slower: float = 1.0
) -> None:
    """Times in which pipeline parallelism is ten times as fast; so the decision is known.

    Args:
        path: of the profile.
        world_size: ranks.
        gpu: name of their GPUs; None: CPU ranks.
        slower: factor of all times.
    """
    from copus_ext.cost_model.cluster_spec import of_gpu
    from copus_ext.cost_model.megatron_flags import spec_of_arguments
    from copus_ext.planner.configuration import Configuration
    from copus_ext.planner.profile import ProfileStore, Timing
    from megatron.trainer.config.arguments import parse_args, resolve
    from megatron.trainer.config.layout import Layout

    config = resolve(parse_args([*TINY.split(), *BASE]), world_size)
    values = {**config.flat(), "padded_vocab_size": 512}
    model = spec_of_arguments(type("Flags", (), values)())
    machine = {
        "model": model.to_json(),
        "world_size": world_size,
        "gpu": gpu or of_gpu("CPU-rank", nodes=1, gpus_per_node=world_size).gpu.name,
    }
    store = ProfileStore(path, machine)
    for tp, pp in [(1, 1), (2, 1), (1, 2)]:
        dp = world_size // (tp * pp)
        for micro in (1, 2, 4, 8):
            for count in (2, 8):
                seconds = slower * 0.03 * count * micro * dp * (0.1 if pp == 2 else 1.0)
                store.add(
                    Timing(
                        configuration=Configuration(
                            layout=Layout(tp=tp, pp=pp, dp=dp),
                            micro_batch_size=micro,
                            global_batch_size=count * dp * micro,
                        ),
                        step_s=seconds,
                        spread_s=0.01 * seconds,
                        num_steps=10,
                    )
                )


def main(output: Path) -> Any:
    import torch.distributed as dist

    from copus_ext.controller.callback import Controller
    from copus_ext.controller.flags import CopusConfig
    from megatron.trainer.train.callbacks import CallbackContext

    class Noting(Controller):
        """Also keeps what every rank came to."""

        def __init__(self, **flags: Any) -> None:
            super().__init__(CopusConfig(copus=True, copus_layouts="all", **flags))
            self.states: list[str] = []

        def on_train_end(self, context: CallbackContext) -> None:
            super().on_train_end(context)
            self.states.append(json.dumps(context.state.to_json()["callbacks"]["copus_control"]))
            self.states.append(json.dumps(context.state.callbacks["copus_noise"]))

    class Failing(Noting):
        def on_setup_start(self, context: CallbackContext) -> None:
            super().on_setup_start(context)
            assert self.layout_changes is not None

            def fault(phase: str) -> None:
                if phase == "verify" and dist.get_rank() == 1:
                    raise MemoryError("no room")

            self.layout_changes.fault = fault

    profile = output / "profile.jsonl"
    if dist.get_rank() == 0:
        write_profile(profile, dist.get_world_size())
    dist.barrier()
    record = Recorder(output, BASE)
    flags = {
        "copus_profile": str(profile),
        "copus_policy": "static",
        "copus_max_micro_batch_size": 1,
    }
    save = ["--save", str(output / "saved"), "--save-interval", "10"]
    record("moved", [*save, *TRACED, "--profile-ranks", "0", "1"], Noting(**flags))
    record("plain", [])
    record("observed", [], Noting(**flags, copus_mode="observe"))
    record("rolled back", [], Failing(**flags))
    record("resumed", ["--load", str(output / "saved"), "--ckpt-step", "20"], Noting(**flags))
    return record.results
