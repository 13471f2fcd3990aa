"""Takes running jobs through layouts and looks at every element of their state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.jobs import FURTHER, MOE, TINY, TINY_GPT2, run
from tests.helpers.walks import walk

if TYPE_CHECKING:
    from megatron.trainer.common.step_settings import StepSettings

SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 5000"
ODD = "--hidden-size 96 --ffn-hidden-size 200 --kv-channels 12 --num-layers 4"
ALL = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]
MAX = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (2, 2, 1), (1, 2, 2)]
FEW = [(1, 1, 1), (2, 1, 1), (1, 2, 2)]
CUTS = [
    (1, 1, 1),
    (1, 2, 1),
    (1, 2, 1, (3, 1)),
    (2, 2, 1, (1, 3)),
    (1, 2, 2, (0, 2, 1, 1)),
    (1, 4, 1, (0, 3, 1, 0)),
]
EXPERTS = [
    "tp1.pp1.dp4",
    "tp2.pp2.ep2.etp1.dp1",
    "tp1.pp1.ep2.dp4",
    "tp1.pp1.ep4.dp4",
    "tp4.pp1.ep2.etp1.dp1",
    "tp2.pp1.dp2",
    "tp1.cp2.pp1.ep4.dp2",
    "tp2.pp1.ep2.dp2",
    "tp2.pp1.ep4.etp1.dp2",
]
FEW_EXPERTS = ["tp2.pp1.dp2", "tp2.pp1.ep2.dp2", "tp2.pp1.ep4.etp1.dp2"]
MIXED = ["tp1.pp1.ep2.dp4", "tp1.pp4.dp1", "tp2.pp1.etp1.dp2", "tp1.pp2.vpp2.ep2.dp2"]
SHARING = ["tp1.pp1.dp4", "tp1.cp2.pp1.dp2", "tp1.cp4.pp1.dp1"]
NOT_ONLY_SHARING = [
    SHARING[0],
    "tp2.cp2.pp1.dp1",
    "tp2.pp1.dp2",
    "tp1.cp2.pp2.vpp2.dp1",
]
ROUTED = """--moe-balance lagged --moe-aux-loss-coeff 0.1 --moe-router-score-function sigmoid
--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1
--moe-token-dispatcher-type allgather"""
SHARED_EXPERT = "--moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate"
THREE = [(1, 1, 1), (1, 3, 1), (1, 3, 2)]
SIX = "--num-layers 6 --hidden-size 96 --ffn-hidden-size 200 --kv-channels 12"
BATCH = "--global-batch-size 4"


def there_and_back(layouts: list[Any]) -> list[Any]:
    """A closed walk that enters each layout twice, from either neighbour in the list."""
    around = [*layouts, layouts[0]]
    return around + around[-2::-1]


VARIANTS: dict[str, tuple[str, list[Any], Any]] = {
    "llama": (f"{TINY} {BATCH} {SHARDED}", walk(MAX), (1, 2, 2)),
    "gpt2-odd-bf16": (
        f"{TINY_GPT2} {BATCH} {ODD} --bf16 {OVERLAP}",
        there_and_back(ALL),
        (1, 4, 1),
    ),
    "gpt2-cuts": (f"{TINY_GPT2} {BATCH} {OVERLAP}", there_and_back(CUTS), (1, 2, 2, (0, 2, 1, 1))),
    "further-bf16": (f"{FURTHER} {BATCH} --bf16 {OVERLAP}", walk(FEW), (2, 2, 1)),
    "llama-plain": (f"{TINY} {BATCH}", walk(FEW), (1, 2, 2)),
    "gpt2-bf16-plain": (f"{TINY_GPT2} {BATCH} --bf16", walk(FEW), (2, 1, 1)),
    "llama-kept": (f"{TINY} {BATCH} {SHARDED}", there_and_back([*FEW, (2, 2, 1)]), (2, 1, 1)),
    "llama-fp16": (
        f"{TINY} {BATCH} --fp16 --initial-loss-scale 1024 {SHARDED}",
        walk(FEW),
        (2, 1, 1),
    ),
    "context": (
        f"{TINY} {BATCH} {SHARDED}",
        walk(SHARING) + there_and_back(NOT_ONLY_SHARING)[1:],
        "tp1.cp2.pp2.dp1",
    ),
    "moe": (f"{MOE} {BATCH} {ROUTED} {SHARDED}", there_and_back(EXPERTS), "tp1.pp2.ep2.dp2"),
    "moe-mixed-bf16": (
        f"{MOE} {BATCH} {ROUTED} {SHARED_EXPERT} --moe-layer-freq [0]*1+[1]*3 --bf16 {OVERLAP}",
        walk(MIXED),
        "tp1.pp1.ep4.dp4",
    ),
    "moe-plain": (f"{MOE} {BATCH} {ROUTED}", walk(FEW_EXPERTS), "tp1.pp2.ep2.dp2"),
    "three": (
        f"{TINY_GPT2} {SIX} --global-batch-size 6 --bf16 {OVERLAP}",
        walk(THREE),
        (1, 3, 1),
    ),
    "own-batch": (
        f"{TINY} --tensor-model-parallel-size 2 --micro-batch-size 4 {SHARDED}",
        there_and_back([(2, 1, 1), (1, 1, 1), (1, 2, 2)]),
        (1, 1, 1),
    ),
}
"""Flags of a model; the layouts (a text, or tp, pp, vpp and uneven layers of chunks) that it goes
through, first to last, which are the same; and the one that it then trains on in."""
DAILY = ("llama", "gpt2-odd-bf16", "llama-plain", "llama-kept", "moe", "own-batch")
"""The variants of every commit; what the others have beside is nightly."""
BEFORE, AFTER = 2, 2
SIZES = {"own-batch": (8, 2)}
"""Batch and micro-batch that a controller has set where the changes begin. Of the layouts of this
variant, only the first can cut the batch into the micro-batches of the flags."""


def layout_of(place: Any, world_size: int) -> Any:
    """The layout of a text, or of sizes as in `VARIANTS`."""
    from megatron.trainer.config.layout import Layout

    if isinstance(place, str):
        return Layout.from_text(place)
    tp, pp, vpp, *uneven = place
    dp, cut = world_size // (tp * pp), uneven[0] if uneven else None
    return Layout(tp=tp, pp=pp, vpp=vpp, dp=dp, layer_partition=cut)


def state_of(job: Any) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    """Every element of the global state on every rank, this rank's shards, and the rest.

    Fails if copies of an element differ, an element is missing, or a weight is not its rounded
    master.
    """
    import torch
    import torch.distributed as dist

    from copus_ext.reshard.transfer import view_of
    from megatron.trainer.model.shards import local_shards, weights_of

    for chunk in job.model.chunks:
        if chunk.ddp_config.overlap_param_gather:
            # Else the other ranks' weights only come with the next forward pass.
            chunk.start_param_sync(force_sync=True)
    shards = local_shards(job.model, job.optimizer, job.groups)
    # Arrays: to pickle a small tensor takes many times as long.
    own = [
        (r, {k: view_of(t, r, (r.lo, r.hi)).numpy() for k, t in shards.tensors[r.shard].items()})
        for r in shards.records
    ]
    weights = [(r, w.detach().float().numpy()) for r, w in weights_of(job.model, job.groups)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, weights))
    dtype = next(iter(job.model.chunks[0].parameters())).dtype
    full: dict[str, Any] = {}
    for records, _ in gathered:
        for r, parts in records:
            place = tuple(map(slice, r.lo, r.hi))
            for kind, array in parts.items():
                whole = full.setdefault(f"{kind}.{r.key}", torch.full(r.shape, torch.nan))
                part = torch.from_numpy(array)
                seen = ~whole[place].isnan()
                assert torch.equal(whole[place][seen], part[seen]), "copies differ"
                whole[place] = part
    holes = [name for name, whole in full.items() if whole.isnan().any()]
    assert not holes, holes
    for _, held in gathered:
        for r, weight in held:
            master = full[f"param.{r.key}"][tuple(map(slice, r.lo, r.hi))]
            rounded = master.reshape(weight.shape).to(dtype).float()
            assert torch.equal(torch.from_numpy(weight), rounded), r.key
    local = [{k: v.clone() for k, v in t.items()} for t in shards.tensors]
    parts = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
    rest = {
        "steps": sorted(
            {g.get("step") for p in parts for g in p.optimizer.param_groups if "betas" in g}
        ),
        "lr": sorted({(g["lr"], g["weight_decay"]) for g in job.optimizer.param_groups}),
        "kept": sorted(
            {
                str([g.get(n) for n in ("betas", "eps", "momentum")])
                for g in job.optimizer.param_groups
            }
        ),
        "scale": job.optimizer.get_loss_scale().item(),
        "state": job.state.to_json(),
    }
    return full, local, rest


def held_bytes(job: Any) -> tuple[int, int]:
    """Bytes of this rank's fp32 state: those of its tensors, and as a change of layout counts."""
    from copus_ext.reshard.parameters import shape_of
    from copus_ext.reshard.plan import element_bytes
    from megatron.trainer.model.shards import local_shards

    shards, shape = local_shards(job.model, job.optimizer, job.groups), shape_of(job.config)
    counted = sum(r.numel * element_bytes(shape, r.key, len(r.lo)) for r in shards.records)
    return sum(t.numel() * 4 for own in shards.tensors for t in own.values()), counted


def equal(a: Any, b: Any) -> bool:
    """Whether two sets of tensors are the same, bit for bit."""
    import torch

    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))


def wanderer(
    visit: Callable[[Any, Any], Iterator[dict[str, Any]]],
    *,
    settings: StepSettings | None = None,
    **mover_arguments: Any,
) -> Any:
    """A callback that changes the layout at one boundary, which also brings settings.

    Args:
        visit: called with the job and the mover, makes the changes and gives a row for each.
        settings: from there on.
        mover_arguments: of the mover.
    """
    import psutil
    import torch.distributed as dist

    from copus_ext.reshard.inprocess import InProcessResharder
    from megatron.trainer.common.step_settings import Request
    from megatron.trainer.train.callbacks import Callback, CallbackContext

    class Wander(Callback):
        def __init__(self) -> None:
            self.rows: list[dict[str, Any]] = []
            self.mover: InProcessResharder | None = None

        def on_setup_start(self, context: CallbackContext) -> None:
            self.mover = InProcessResharder(**mover_arguments)

        def on_train_step_end(self, context: CallbackContext) -> Request | None:
            if context.state.iteration != BEFORE:
                return None
            return Request(kind="change", reason="test", settings=settings, move=self.wander)

        def on_train_end(self, context: CallbackContext) -> None:
            if self.mover is not None:
                self.mover.close()

        def wander(self, job: Any) -> None:
            for row in visit(job, self.mover):
                row["num_groups"] = len(dist.distributed_c10d._world.pg_map)
                row["num_fds"] = psutil.Process().num_fds()
                row["num_threads"] = psutil.Process().num_threads()
                self.rows.append(row)

    return Wander()


def main(output: Path, *names: str) -> Any:
    """Returns what every change did, and the losses around one."""
    import torch.distributed as dist

    from copus_ext.reshard.trainer_host import TrainerHost
    from megatron.trainer.common.step_settings import StepSettings

    def visit(places: list[Any], job: Any, mover: Any) -> Iterator[dict[str, Any]]:
        before, local, rest = state_of(job)
        visited = {job.config.layout: local}
        for place in places:
            to = layout_of(place, dist.get_world_size())
            start = str(job.config.layout)
            built = mover.build_ahead(TrainerHost(job), [to])
            outcome = mover.move(TrainerHost(job), to, job.state.settings)
            after, local, now = state_of(job)
            was = visited.setdefault(to, local)
            yield {
                "from": start,
                "to": str(to),
                "built_ahead": built,
                "kind": outcome.kind,
                "reason": outcome.reason,
                "is_equal": equal(before, after),
                "is_own_equal": equal(was, local),
                "rest": [rest, now],
                "wire_bytes": outcome.wire_bytes,
                "minimum_bytes": outcome.minimum_bytes,
                "held_bytes": held_bytes(job),
                "phases": outcome.phases,
            }

    results: dict[str, Any] = {}
    for name in names:
        base, path, last = VARIANTS[name]
        flags = ["--train-iters", str(BEFORE + AFTER), "--clip-grad", "1.0"]
        batch, micro = SIZES.get(name, (None, None))
        settings = StepSettings(global_batch_size=batch, micro_batch_size=micro)
        wandering = wanderer(
            functools.partial(visit, [*path[1:], last]),
            settings=settings if batch else None,
            prebuild=2 if name.endswith("kept") else 0,
        )
        losses = {}
        for label, callbacks in (("whole", []), ("moved", [wandering])):
            steps = run(flags, output / f"{name}-{label}", callbacks, base=base)
            losses[label] = [
                [s["losses"]["lm loss"], s["grad_norm"], s["learning_rate"], s["consumed_samples"]]
                for s in steps
            ]
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, wandering.rows)
        results[name] = {"rows": rows, "losses": losses}
    return results
