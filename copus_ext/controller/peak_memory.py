"""Measures on GPUs what memory the configurations of a run need, which corrects predictions.

What ran once teaches the planner how much others need. CPU ranks have no such counters.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from copus_ext.controller.present_samples import PresentSamples
from copus_ext.controller.throughput_table import configuration_of_run
from copus_ext.cost_model.spec_file import is_positive
from copus_ext.planner.configuration import Configuration
from megatron.training.common.collectives import broadcast_from_rank0
from megatron.training.train.callbacks import Callback, CallbackContext

if TYPE_CHECKING:
    from megatron.training.config import Config

logger = logging.getLogger(__name__)

FILE = Path("control") / "peak_memory.jsonl"
"""In the directory of the run; a line for each configuration and each higher peak."""
_LOOKS_AFTER = (3, 16)
"""Steps of a configuration, besides its first, after which its peak is read. The first one has
what an earlier configuration has left, and makes the optimizer's state in a new run. Later ones
measure the noise scale too."""


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


def name_of(c: Configuration, seq_length: int) -> str:
    """The same for two configurations that need the same memory. Without stages each micro-batch
    ends before the next begins, so that their number does not matter."""
    count = c.num_microbatches if c.layout.pp > 1 else 1
    plain = replace(c, pipeline_message_bits=None)
    return f"{plain},num_microbatches={count},seq_length={seq_length}"


def peaks_of(run_dir: Path | None, config: Config) -> Callable[[Configuration], float | None]:
    """Says of configurations of a run what memory they needed at most on one GPU, bytes; None where
    that was not measured. It sees what is measured from now on."""
    known = _Known(run_dir)
    return lambda c: known.peaks.get(name_of(c, config.batch.seq_length))


class _Known:
    """The highest peak of each configuration in the file, read again when it has grown."""

    def __init__(self, run_dir: Path | None) -> None:
        self._path = run_dir and run_dir / FILE
        self._size, self._peaks = 0, dict[str, float]()

    @property
    def peaks(self) -> Mapping[str, float]:
        """By name, bytes. Lines that a kill cut short are left out."""
        try:
            size = self._path.stat().st_size if self._path else 0
            if self._path and size != self._size:
                self._peaks = _read(self._path.read_text())
                self._size = size
        except OSError:
            pass
        return self._peaks


def _read(text: str) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for line in text.splitlines():
        try:
            found = json.loads(line)
            name, peak = found["configuration"], found["peak_bytes"]
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(name, str) and is_positive(peak):
            peaks[name] = max(peak, peaks.get(name, 0.0))
    return peaks


class PeakMemoryCallback(Callback):
    """Writes down the peak of each configuration that the run trains in, on rank 0."""

    def on_setup_start(self, context: CallbackContext) -> None:
        """Reads what earlier launches have measured."""
        self._run_dir = broadcast_from_rank0(context.run_dir)
        self._known = _Known(self._run_dir)
        self._name, self._steps = "", 0

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Reads the peak some steps after a change. Collective in those steps, which are the same
        on all ranks."""
        is_cuda = context.config.runtime.device == "cuda"
        if self._run_dir is None or not is_cuda or context.step is None:
            return
        context = PresentSamples().of(context)
        step, config = context.step, context.config
        assert step is not None
        c = configuration_of_run(config, step.micro_batch_size, step.global_batch_size)
        name = name_of(c, config.batch.seq_length)
        if name != self._name:
            self._name, self._steps = name, 0
            forget_peaks()
            return
        self._steps += 1
        if self._steps in _LOOKS_AFTER:
            peak = peak_bytes_here()
            if dist.get_rank() == 0:
                self._note(peak)

    def _note(self, peak: float) -> None:
        assert self._run_dir is not None
        if peak <= self._known.peaks.get(self._name, 0.0):
            return
        try:
            with (self._run_dir / FILE).open("a") as file:
                file.write(json.dumps({"configuration": self._name, "peak_bytes": peak}) + "\n")
        except OSError as error:
            logger.warning("%s: %s; the peak of memory is not kept", self._run_dir / FILE, error)
