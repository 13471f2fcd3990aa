"""Measures on GPUs what memory the configurations of a run need, which corrects predictions.

What ran once teaches the planner how much others need. CPU ranks have no such counters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from copus_ext.controller.segments import config_of
from copus_ext.controller.throughput_table import configuration_of_run, gpu_of, model_of
from copus_ext.cost_model.spec_file import SpecError
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import ForeignProfile, ProfileStore, Timing
from megatron.trainer.common.collectives import broadcast_from_rank0
from megatron.trainer.resilience.env_checks import import_core
from megatron.trainer.train.callbacks import Callback, CallbackContext

if TYPE_CHECKING:
    from megatron.trainer.config import Config

logger = logging.getLogger(__name__)

FILE = Path("control") / "peak_memory.jsonl"
"""In the directory of the run; a profile with a line for each configuration and higher peak."""
_LOOKS_AFTER = (3, 16)
"""Steps of a configuration, besides its first, after which its peak is read. The first step has
what an earlier configuration has left, and makes the optimizer's state in a new run. By the second
look the noise scale has been measured, too."""


def peak_bytes_here() -> float:
    """Memory that the GPU that needs most has had in use since `forget_peaks`, with context and
    libraries. Collective; each rank has its own GPU as the current device."""
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    peak = torch.cuda.max_memory_reserved() + outside
    most = torch.tensor(float(peak), device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def forget_peaks() -> None:
    """Gives back what an earlier configuration has left in the GPU's allocator; its peak is not
    that of the next one."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def alike(c: Configuration) -> tuple[Any, ...]:
    """Equal for configurations that need the same memory. Without stages each micro-batch ends
    before the next begins; with stages no more than two for each are in flight."""
    count = min(c.num_microbatches, 2 * c.layout.pp) if c.layout.pp > 1 else 1
    return *c.line, c.layout.layer_partition, count


def library_versions() -> dict[str, str]:
    """Versions of what computes, by package, as profiles name them. The package of megatron-core
    says its own: a source tree on the path has no metadata of an installed one."""
    return {"torch": version("torch"), "megatron-core": import_core().__version__}


class PeakStore:
    """The peaks of a run of one model, with samples of one length, on one kind of GPU."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        """Opens the file of a run on GPUs.

        Raises:
            SpecError: a model that the planner does not know.
        """
        gpu = gpu_of(config)
        parts = {
            "model": model_of(config).to_json(),
            "gpu": gpu and gpu[0],
            "versions": library_versions(),
        }
        self._file = ProfileStore(run_dir / FILE, parts)
        self._size, self._highest = -1, dict[tuple[Any, ...], Timing]()

    def read(self) -> dict[tuple[Any, ...], Timing]:
        """The configuration with the highest peak of those that are `alike`, read again when the
        file has grown. Peaks of another model or machine are left out."""
        try:
            size = self._file.path.stat().st_size
            found = self._file.read() if size != self._size else None
        except (OSError, ForeignProfile):
            return self._highest
        if found is not None:
            self._size = size
            for one in sorted(found, key=lambda x: x.peak_bytes or 0.0):
                self._highest[alike(one.configuration)] = one
        return self._highest

    def add(self, c: Configuration, *, step_s: float, peak_bytes: float) -> None:
        """Keeps a peak that is higher than those known of the same. Uneven stages are left out, as
        a profile knows even ones only."""
        if c.layout.layer_partition:
            return
        known = self.read().get(alike(c))
        if known is None or peak_bytes > (known.peak_bytes or 0.0):
            self._file.add(Timing(configuration=c, step_s=step_s, peak_bytes=peak_bytes))


def peaks_of(run_dir: Path | None, config: Config) -> Callable[[], Sequence[Timing]]:
    """Returns what tells the peaks of a run, also those that are measured later; none on CPU
    ranks."""
    if run_dir is None or config.runtime.device != "cuda":
        return list
    try:
        store = PeakStore(run_dir, config)
    except SpecError:  # nothing is predicted for it
        return list
    return lambda: list(store.read().values())


class PeakMemoryCallback(Callback):
    """Writes down the peak of each configuration that the run trains in, on rank 0."""

    def on_setup_start(self, context: CallbackContext) -> None:
        self._run_dir = broadcast_from_rank0(context.run_dir)
        self._steps = 0
        self._now: tuple[Any, ...] | None = None

    def on_relayout_end(self, context: CallbackContext) -> None:
        """Counts anew: a move holds copies of the state, also one that fails."""
        self._now = None

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Reads the peak some steps after a change. Collective in those steps, which are the same
        on all ranks."""
        if self._run_dir is None or context.config.runtime.device != "cuda":
            return
        step, config = context.step, config_of(context)
        assert step is not None
        c = configuration_of_run(config, step.micro_batch_size, step.global_batch_size)
        now = (config.batch.seq_length, *alike(c))
        if now != self._now:
            self._now, self._steps = now, 0
            forget_peaks()
            return
        self._steps += 1
        if self._steps in _LOOKS_AFTER:
            peak = peak_bytes_here()
            if dist.get_rank() == 0:
                self._keep(config, c, step.elapsed_s, peak)

    def _keep(self, config: Config, c: Configuration, step_s: float, peak_bytes: float) -> None:
        assert self._run_dir is not None
        try:
            PeakStore(self._run_dir, config).add(c, step_s=step_s, peak_bytes=peak_bytes)
        except SpecError:
            return
        except OSError as error:
            logger.warning("%s: %s; the peak of memory is not kept", self._run_dir / FILE, error)
