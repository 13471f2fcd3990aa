"""Trains the same steps under many layouts with the gradient tap open, in the same processes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.jobs import FURTHER, MOE, TINY, TINY_GPT2, layout_flags, run
from tests.helpers.text import lines_prefix

SHARDED = "--use-distributed-optimizer"
REDUCE = f"{SHARDED} --overlap-grad-reduce --ddp-bucket-size 5000"
UNEVEN = "--micro-batch-size 3 --allow-uneven-micro-batches"
MASKED = "--eod-mask-loss"
OVERLAP = f"{REDUCE} --overlap-param-gather"
EXPERTS = "--moe-shared-expert-intermediate-size 16 --moe-balance lagged --moe-aux-loss-coeff 0.1"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
ALONE = "--expert-tensor-parallel-size 1"
BASES = {"llama": TINY, "gpt2": TINY_GPT2, "further": FURTHER, "moe": f"{MOE} {EXPERTS}"}
STEPS = 2
SPOILT = 3
# Model, estimator, samples of a small group; then layouts of four ranks that must agree: tp, pp,
# vpp, flags. Replicas read whole micro-batches in turn, so that the samples of `rank` depend on
# their size.
FAMILIES: dict[tuple[str, str, str], list[tuple[int, int, int, str]]] = {
    ("llama", "micro", "1"): [
        (1, 1, 1, ""),
        (1, 2, 2, OVERLAP),
        (2, 1, 1, "--sequence-parallel --overlap-grad-reduce"),
        (1, 1, 1, f"{OVERLAP} --calculate-per-token-loss"),
        (1, 4, 1, SHARDED),
        (2, 2, 2, ""),
        (2, 1, 1, "--use-tp-pp-dp-mapping --calculate-per-token-loss"),
    ],
    ("gpt2", "micro", "1"): [
        (1, 1, 1, OVERLAP),
        (2, 2, 1, f"--recompute-activations {SHARDED}"),
        (4, 1, 1, "--sequence-parallel"),
    ],
    ("further", "micro", "1"): [
        (1, 1, 1, ""),
        (2, 2, 1, OVERLAP),
    ],
    ("llama", "micro", "1, some tokens masked"): [
        (1, 1, 1, MASKED),
        (1, 2, 2, f"{MASKED} {REDUCE}"),
        (2, 1, 1, f"{MASKED} --sequence-parallel"),
    ],
    ("llama", "micro", "1, masked, per token"): [
        (1, 1, 1, f"{MASKED} --calculate-per-token-loss"),
        (2, 1, 1, f"{MASKED} --calculate-per-token-loss {SHARDED}"),
        (1, 4, 1, f"{MASKED} --calculate-per-token-loss"),
    ],
    ("llama", "micro", "3 and 1"): [
        (2, 1, 1, UNEVEN),
        (2, 1, 1, f"{UNEVEN} {SHARDED} --calculate-per-token-loss"),
    ],
    ("llama", "rank", "3 and 1"): [
        (2, 1, 1, UNEVEN),
        (2, 1, 1, f"{UNEVEN} {OVERLAP} --calculate-per-token-loss"),
    ],
    ("llama", "rank", "4 one by one"): [
        (2, 1, 1, ""),
        (1, 1, 1, f"{CP2} {OVERLAP}"),
        (1, 2, 2, REDUCE),
        (1, 1, 1, f"{CP2} --cp-comm-type a2a --calculate-per-token-loss"),
        (1, 2, 1, f"{SHARDED} --calculate-per-token-loss"),
    ],
    ("llama", "rank", "4 in twos"): [
        (2, 1, 1, "--micro-batch-size 2"),
        (1, 2, 1, f"{OVERLAP} --micro-batch-size 2"),
        (1, 1, 1, f"{CP2} {SHARDED} --micro-batch-size 2"),
    ],
    ("llama", "rank", "4, masked"): [
        (2, 1, 1, MASKED),
        (1, 1, 1, f"{MASKED} {CP2} {OVERLAP}"),
    ],
    ("llama", "rank", "4 at once"): [
        (2, 1, 1, f"{SHARDED} --micro-batch-size 4 --calculate-per-token-loss"),
        (1, 2, 1, f"{OVERLAP} --micro-batch-size 4"),
    ],
    ("gpt2", "rank", "2"): [
        (1, 1, 1, "--micro-batch-size 2"),
        (1, 1, 1, f"{OVERLAP} --micro-batch-size 2"),
    ],
    ("llama", "half", "4"): [
        (4, 1, 1, ""),
        (2, 2, 2, f"{SHARDED} --overlap-grad-reduce --micro-batch-size 1"),
        (1, 1, 1, f"{CP4} {OVERLAP} --micro-batch-size 2"),
        (1, 4, 1, f"{SHARDED} --micro-batch-size 4"),
        (2, 2, 1, "--calculate-per-token-loss --micro-batch-size 2"),
        (2, 1, 1, f"{CP2} --calculate-per-token-loss"),
        (1, 2, 2, f"{CP2} {SHARDED} --micro-batch-size 2"),
    ],
    ("gpt2", "half", "1"): [(1, 1, 1, ""), (1, 1, 1, OVERLAP)],
    ("moe", "micro", "1"): [
        (1, 1, 1, OVERLAP),
        (2, 1, 1, f"{EP2} {ALONE} {OVERLAP}"),
        (2, 1, 1, SHARDED),
        (2, 2, 1, f"{EP2} {ALONE}"),
        (1, 4, 1, "--calculate-per-token-loss"),
        (4, 1, 1, f"{EP4} {ALONE} --calculate-per-token-loss {SHARDED}"),
    ],
    ("moe", "micro", "1, experts 2"): [
        (1, 1, 1, f"{EP2} {OVERLAP}"),
        (1, 2, 1, f"{EP2} {SHARDED}"),
        (2, 1, 1, f"{EP4} {ALONE}"),
    ],
    ("moe", "micro", "2"): [
        (2, 1, 1, "--micro-batch-size 2"),
        (1, 2, 1, f"--micro-batch-size 2 {OVERLAP} --calculate-per-token-loss"),
    ],
    ("moe", "micro", "1, experts 2, masked"): [
        (1, 1, 1, f"{EP2} {MASKED}"),
        (2, 1, 1, f"{EP4} {ALONE} {MASKED} {SHARDED}"),
    ],
    ("moe", "rank", "4 one by one"): [
        (2, 1, 1, f"{EP2} {ALONE}"),
        (1, 1, 1, f"{CP2} {EP2} {OVERLAP}"),
        (1, 1, 1, f"{CP2} {EP2} --calculate-per-token-loss"),
    ],
    ("moe", "rank", "2 in twos, experts 4"): [
        (1, 1, 1, f"{EP2} --micro-batch-size 2 {OVERLAP}"),
        (1, 1, 1, f"{EP2} --micro-batch-size 2"),
    ],
}

NUM_DAILY = {
    ("llama", "micro", "1"): 3,
    ("llama", "micro", "3 and 1"): 0,
    ("llama", "rank", "4 one by one"): 3,
    ("llama", "rank", "4 in twos"): 0,
    ("llama", "rank", "4 at once"): 0,
    ("gpt2", "rank", "2"): 0,
    ("llama", "half", "4"): 3,
    ("gpt2", "half", "1"): 0,
    ("moe", "micro", "2"): 1,
    ("moe", "micro", "1, experts 2, masked"): 0,
    ("moe", "rank", "2 in twos, experts 4"): 0,
}
"""How many of a family's layouts every commit measures, the first of them; two of another."""


def cases(*, daily: bool) -> list[tuple[str, str, str, tuple[int, int, int, str]]]:
    """Family and layout: those of every commit, or those that are nightly."""
    found = []
    for family, layouts in FAMILIES.items():
        num = NUM_DAILY.get(family, 2)
        found += [(*family, layout) for layout in (layouts[:num] if daily else layouts[num:])]
    return found


def watched_class() -> Any:
    """The class of a callback that can be looked into; what it imports is only there in the
    processes of a run."""
    import torch.distributed as dist

    from copus_ext.controller.flags import CopusConfig
    from copus_ext.controller.gns_callback import STATE_KEY, GradientNoiseCallback
    from megatron.trainer.train.callbacks import CallbackContext

    class Watched(GradientNoiseCallback):
        """Keeps what the controller knew at set-up and after every step."""

        def __init__(self, *, spoil: bool = False, **flags: Any) -> None:
            super().__init__(CopusConfig(copus=True, **flags))
            self.spoil, self.at_setup, self.states = spoil, {}, []

        def on_setup_start(self, context: CallbackContext) -> None:
            super().on_setup_start(context)
            self.at_setup = self.observer.to_json()

        def on_grads_ready(self, context: CallbackContext) -> None:
            if self.spoil and context.state.iteration + 1 == SPOILT and dist.get_rank() == 1:
                context.model[0].buffers[0].grad_data.fill_(math.nan)
            super().on_grads_ready(context)

        def on_train_step_end(self, context: CallbackContext) -> None:
            super().on_train_step_end(context)
            self.states.append(json.dumps(context.state.callbacks[STATE_KEY]))

    return Watched


def main(output: Path, *words: str) -> Any:
    import torch.distributed as dist

    from copus_ext.controller import gns_callback
    from copus_ext.gns import hooks

    Watched = watched_class()
    result: dict[str, Any] = {}

    def record(name: str, flags: str, base: str = TINY, *, plain: bool = False, **how: Any) -> Any:
        watched = Watched(**how)
        folder = output / name.replace("/", "_").replace(" ", "")
        before = count.total
        steps = run(flags.split(), folder, [] if plain else [watched], base=base)
        seen: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seen, watched.states)
        if dist.get_rank() == 0:
            result[name] = {
                "losses": [step["losses"]["lm loss"] for step in steps],
                "grad_norms": [step["grad_norm"] for step in steps],
                "updated": [step["updated"] for step in steps],
                "noise": [step.get("noise") for step in steps],
                "same_on_all_ranks": all(states == seen[0] for states in seen),
                "at_setup": watched.at_setup,
                "states": [json.loads(state) for state in watched.states],
                "collectives": count.total - before,
                "broken": watched.observer.is_broken,
            }

    count = _CollectiveCount(dist)
    for model, estimator, group, layout in cases(daily=True) + cases(daily=False) * bool(words):
        flags = " ".join([*layout_flags(*layout[:3]), layout[3], f"--train-iters {STEPS}"])
        if MASKED in flags:
            flags += f" --data-path {lines_prefix()}"
        name = case_name(model, estimator, group, layout)
        record(name, flags, BASES[model], copus_gns_estimator=estimator)
    alone = (
        f"--train-iters {8 * STEPS} --exit-interval 8 --global-batch-size 1 --lr 1e-30 --min-lr 0"
    )
    record("alone", f"{layout_flags_text(1, 4)} {alone}", plain=True)
    four = f"--train-iters 4 {OVERLAP}"
    record("plain", four, plain=True)
    for estimator in ("micro", "rank", "half"):
        record(f"observed {estimator}", four, copus_gns_estimator=estimator)
    record("every second", four, copus_gns_interval=2)
    record("spoilt", f"{layout_flags_text(2, 1)} --train-iters 4", spoil=True)
    record("parts", f"{layout_flags_text(4, 1)} {ALONE} {EP2} --train-iters 2", BASES["moe"])
    record("whole", f"{EP4} --train-iters 2 --micro-batch-size 2", BASES["moe"])
    record("bf16", f"{four} --bf16")
    record("fp32", four)
    for bits in (8, 12):
        record(f"fp16 {bits}", f"{four} --fp16 --loss-scale {2**bits}")
    for mbs in (1, 2):
        flags = f"--train-iters 2 --micro-batch-size {mbs} --global-batch-size 8"
        record(f"auto {mbs}", flags)
    record("blind", f"{layout_flags_text(1, 4)} --train-iters 2 --micro-batch-size 8")
    saved = output / "saved"
    save = f"{layout_flags_text(2, 1)} {SHARDED} --train-iters 4 --save {saved}"
    record("first half", f"{save} --exit-interval 2")
    move = f"{layout_flags_text(1, 2)} {SHARDED} --train-iters 4 --load {saved}"
    record("moved", move)
    record("unmoved", f"{layout_flags_text(2, 1)} {SHARDED} --train-iters 4")
    with patch.object(hooks, "share_of_sum", lambda grads, _group: flat(grads)):
        record("parts squared", f"{CP2} --train-iters 1", copus_gns_estimator="rank")
        # The run itself sees that such squares contradict each other; what they are is asked here.
        with patch.object(gns_callback, "_NEGATIVE_TOLERANCE", math.inf):
            record("parts let pass", f"{CP2} --train-iters 1", copus_gns_estimator="rank")
    with _counting_norms_on_every_rank():
        record("wrong", f"{layout_flags_text(4, 1)} --train-iters 2")
    result["pieces"] = sums_in_pieces()
    return result


def sums_in_pieces() -> list[tuple[int, int, bool]]:
    """Sums of gradients over two and four ranks, by pieces of a buffer of every size. Four numbers
    have several orders to be added up in, which the backend chooses by size: those are whole.

    Returns:
        Ranks, elements of the buffer, and whether no piece is larger and the sum is bit for bit
        the one at once.
    """
    import torch
    import torch.distributed as dist

    from copus_ext.gns import shared_gradient

    found, rank = [], dist.get_rank()
    pairs: list[Any] = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    torch.manual_seed(rank)
    grads = [torch.randn(shape) * 10.0**k for k, shape in enumerate([(3, 5), (1,), (40, 2), (7,)])]
    grads[2] = grads[2].T
    reduce = dist.reduce_scatter_tensor
    groups: list[Any] = [pairs[rank // 2], dist.group.WORLD]
    for group in groups:
        size = group.size()
        if size > 2:
            grads = [grad.round() for grad in grads]
        at_once = flat([*grads, torch.zeros(-103 % size)])
        want = at_once.new_empty(len(at_once) // size)
        reduce(want, at_once, group=group)
        for most in (1, 2, 12, 31, 104, 1000):
            pieces: list[int] = []

            def counted(out: Any, given: Any, *, pieces: list[int] = pieces, **more: Any) -> Any:
                pieces.append(len(given))
                return reduce(out, given, **more)

            with (
                patch.object(shared_gradient, "MAX_ELEMENTS", most),
                patch.object(dist, "reduce_scatter_tensor", counted),
            ):
                got = shared_gradient.share_of_sum(grads, group)
            is_same = [torch.equal(got, want), max(pieces) <= max(most, size)]
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, all(is_same))
            found.append((size, most, all(every)))
    return found


def flat(grads: list[Any]) -> Any:
    """Gradients in one row."""
    import torch

    return torch.cat([grad.reshape(-1) for grad in grads])


def case_name(model: str, estimator: str, group: str, layout: tuple[int, int, int, str]) -> str:
    return f"{model} {estimator} {group} {layout}"


def layout_flags_text(tp: int, pp: int) -> str:
    return " ".join(layout_flags(tp, pp, 1))


class _CollectiveCount:
    """Counts the collectives that this rank starts."""

    def __init__(self, dist: Any) -> None:
        self.total = 0
        names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast")
        for name in names:
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.total += 1
            return function(*args, **kwargs)

        return counted


class _counting_norms_on_every_rank:
    """A mistake that the comparison of layouts is there to find."""

    def __enter__(self) -> None:
        from copus_ext.gns import hooks

        self.right = hooks.param_is_not_tensor_parallel_duplicate
        hooks.param_is_not_tensor_parallel_duplicate = lambda _param: True

    def __exit__(self, *_: object) -> None:
        from copus_ext.gns import hooks

        hooks.param_is_not_tensor_parallel_duplicate = self.right
