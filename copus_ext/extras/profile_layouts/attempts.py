"""Which configurations are not worth an attempt to measure them: those that are predicted not to
fit, and those that earlier attempts have shown to end a run.

A profile records when an attempt begins, and how it ends. So a run that dies of a configuration
leaves word for the next one, which goes on after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec, of_gpu
from copus_ext.cost_model.memory import peaks
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.peak_correction import max_bytes
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.attempts import FORGOTTEN, OUT_OF_MEMORY, Attempts
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.search import Z_DOMINATES
from copus_ext.planner.space import points_of, to_config_batch

_MAX_UNFINISHED = 2
"""A time limit or a lost node also ends a run in the middle of an attempt, but hardly twice in the
same one."""
_GIB = 2**30


class RecordedAttempts(Attempts):
    """The attempts of a profile, with those that this run adds."""

    def forget(self) -> None:
        """Leaves out what is recorded up to now, for this run and for later ones."""
        self._store.add_attempt(FORGOTTEN)
        self._clear()

    def note(self, attempt: str, c: Configuration) -> None:
        """Records what became of an attempt, on the disk before this returns."""
        name, size = _name(c), c.micro_batch_size
        self._store.add_attempt(attempt, configuration=name, micro_batch_size=size)
        self._take(attempt, name, size)

    def why_not(self, c: Configuration) -> str | None:
        """Why a configuration is not tried again; None if it is."""
        name, size = _name(c), c.micro_batch_size
        if (least := self._too_large.get(name)) is not None and least <= size:
            return "out of memory before" + ("" if least == size else f" with micro-batch {least}")
        if (times := self._unfinished[name, size]) >= _MAX_UNFINISHED:
            return f"{times} runs have ended in the middle of it"
        return None

    def has_run_out(self, c: Configuration) -> bool:
        """Whether any rank has recorded that the latest attempt at this very configuration ran out
        of memory."""
        own = _name(c), c.micro_batch_size
        records = self._store.attempts()
        latest = [r for r in records if (r.get("configuration"), r.get("micro_batch_size")) == own]
        return bool(latest) and latest[-1]["attempt"] == OUT_OF_MEMORY


def _name(c: Configuration) -> str:
    """The same for configurations that differ in batch sizes only: a larger micro-batch needs no
    less memory."""
    return str(replace(c, micro_batch_size=1))


def by_memory(
    model: ModelSpec, some: Sequence[Configuration], gpu_bytes: float | None
) -> list[tuple[Configuration, str | None]]:
    """Configurations with those first that are predicted to need least memory, so that most is
    measured before one runs out of it. Those of a model that the cost model does not know stay in
    their order.

    Args:
        model: what is trained.
        some: configurations with the largest batch that is measured.
        gpu_bytes: memory of a GPU; None: they run on CPU ranks, which share the memory of a node.

    Returns:
        Each with a reason where it is as good as sure not to fit, and None elsewhere.
    """
    try:
        model.check_predictable()
    except SpecError:
        return [(c, None) for c in some]
    if not some:
        return []
    needed, sd = peaks(to_config_batch(model, _like(some[0], gpu_bytes), points_of(some)))
    least = max_bytes(needed, sd, -Z_DOMINATES)

    def reason(i: int) -> str | None:
        if gpu_bytes is None or least[i] <= gpu_bytes:
            return None
        own, given = needed[i] / _GIB, gpu_bytes / _GIB
        return f"it needs about {own:.1f} GiB, and a GPU has {given:.1f} GiB"

    return [(some[i], reason(i)) for i in np.argsort(needed, kind="stable")]


def _like(c: Configuration, gpu_bytes: float | None) -> ClusterSpec:
    """A machine that configurations need as many bytes on. All kinds of GPUs are alike in that."""
    gpu = "CPU-rank" if gpu_bytes is None else "H100-80GB"
    return of_gpu(gpu, nodes=1, gpus_per_node=c.layout.world_size)
