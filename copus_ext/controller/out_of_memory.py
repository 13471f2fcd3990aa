"""Remembers what ran out of memory, so that no launch of the run tries it again.

A change of micro-batch or layout is decided anew after a restart from a checkpoint before it.
Without this file the run would meet the same end at the same step.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from copus_ext.controller.peak_memory import peaks_of
from copus_ext.controller.segments import config_of
from copus_ext.controller.throughput_table import MemoryHistory, configuration_of_run
from copus_ext.planner.configuration import Configuration
from copus_ext.planner.profile import append_lines
from copus_ext.reshard.checked import MAX_NUMBER, check_number
from megatron.trainer.common.collectives import broadcast_from_rank0
from megatron.trainer.common.errors import TrainingFailure
from megatron.trainer.common.outside import parse_json
from megatron.trainer.common.plain_file import open_plain
from megatron.trainer.config.layout import Layout
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.train.callbacks import Callback, CallbackContext

if TYPE_CHECKING:
    from megatron.trainer.config import Config

logger = logging.getLogger(__name__)

FILE = Path("control") / "out_of_memory.jsonl"
"""In the directory of the run; a line for each rank that had none left."""
_WORDS = "out of memory", "allocate memory", "alloc_failed"
_WORDS_OF_HOST = "defaultcpuallocator", "host memory", "cudahostalloc", "pin_memory"
_REPLICAS = re.compile(r"\.dp\d+")


@dataclass(frozen=True, kw_only=True)
class TooLarge:
    """A micro-batch that was too large for one layout with its memory options."""

    configuration: str
    """Layout without replicas, and memory options, as the planner writes them for a micro-batch of
    1."""
    replicas: int
    """Fewer need no less memory, as optimizer state is split over them."""
    micro_batch_size: int
    """Samples."""
    seq_length: int
    """Tokens of a sample."""
    of_host: bool = False
    """Whether the memory was that of the host, and not of a GPU."""

    def __post_init__(self) -> None:
        """Refuses with ValueError what a damaged line may hold."""
        if not isinstance(self.configuration, str) or not isinstance(self.of_host, bool):
            raise ValueError("configuration or of_host is of the wrong type")
        for name in ("replicas", "micro_batch_size", "seq_length"):
            check_number(name, getattr(self, name), 1, MAX_NUMBER)

    @classmethod
    def of(cls, c: Configuration, seq_length: int, *, of_host: bool = False) -> TooLarge:
        return cls(
            configuration=_REPLICAS.sub("", str(replace(c, micro_batch_size=1))),
            replicas=c.layout.dp,
            micro_batch_size=c.micro_batch_size,
            seq_length=seq_length,
            of_host=of_host,
        )

    def is_at_most(self, other: TooLarge) -> bool:
        """Whether the other one needs no less memory."""
        tokens, others = (x.micro_batch_size * x.seq_length for x in (self, other))
        is_alike = self.configuration == other.configuration and other.replicas <= self.replicas
        return is_alike and tokens <= others

    def __str__(self) -> str:
        layout, _, options = self.configuration.partition(",micro_batch=1,")
        size = f"micro-batch {self.micro_batch_size} of {self.seq_length} tokens"
        return f"{layout}.dp{self.replicas}, {size} ({options})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is used up, of a GPU or of the host. What a failed change
    of layout quotes is not of the configuration that the run had."""
    if isinstance(error, TrainingFailure):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in _WORDS)


def is_of_host(error: BaseException) -> bool:
    """Whether the memory that is used up is the host's."""
    is_python = isinstance(error, MemoryError)
    return is_python or any(w in str(error).lower() for w in _WORDS_OF_HOST)


def remembered(run_dir: Path | None) -> list[TooLarge]:
    """What was too large in this run; lines that a kill cut short are left out."""
    try:
        if run_dir is None:
            return []
        with open_plain(run_dir / FILE, follow=True) as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(TooLarge(**parse_json(line)))
        except (ValueError, TypeError):
            continue
    return list(dict.fromkeys(found))


def judge_of(run_dir: Path | None, config: Config) -> Callable[[Configuration], bool]:
    """Says of configurations of a run whether nothing that needs as much or less memory has run out
    of it."""
    too_large, seq_length = remembered(run_dir), config.batch.seq_length

    def fits(c: Configuration) -> bool:
        own = TooLarge.of(c, seq_length)
        return not any(one.is_at_most(own) for one in too_large)

    return fits


def too_large_of(run_dir: Path | None, config: Config) -> list[Configuration]:
    """What ran out of a GPU's memory in samples of the present length and with the memory options
    of the run. A layer partition is left out: the planner knows even stages only."""
    found = []
    for one in remembered(run_dir):
        size, _, _ = one.configuration.partition(",")
        try:
            layout = Layout.from_text(f"{size}.dp{one.replicas}")
        except ValueError:
            continue
        # No more micro-batches than two for each stage are in flight.
        batch = 2 * layout.pp * layout.dp * one.micro_batch_size
        c = configuration_of_run(config, one.micro_batch_size, batch, layout)
        if TooLarge.of(c, config.batch.seq_length) == one:
            found.append(c)
    return found


def memory_history(run_dir: Path | None, config: Config) -> MemoryHistory:
    """What the run has learned of the memory that its configurations need."""
    return MemoryHistory(
        fits=judge_of(run_dir, config),
        peaks=peaks_of(run_dir, config),
        too_large=too_large_of(run_dir, config),
    )


def micro_batch_that_fits(context: CallbackContext, micro: int, batch: int) -> int:
    """The micro-batch that a launch begins with: the largest up to the one asked for that has not
    run out of memory; that one if none is left. Collective.

    Args:
        context: of the start.
        micro: what is asked for, samples.
        batch: of the first step, samples.
    """
    found = micro
    if dist.get_rank() == 0:
        config = config_of(context)
        fits = judge_of(context.run_dir, config)
        uneven = config.batch.allow_uneven_micro_batches
        for n in range(micro, 0, -1):
            is_legal = n == micro or not batch_problems(config.layout, n, batch, uneven=uneven)
            if is_legal and fits(configuration_of_run(config, n, batch)):
                found = n
                break
        if found != micro:
            print(f"copus: micro-batch {found} in place of {micro}, which did not fit", flush=True)
    return broadcast_from_rank0(found)


class OutOfMemoryCallback(Callback):
    """Writes down what this rank was training with when it had no memory left.

    An error outside of a step is of something else: a move, a save or an evaluation.
    """

    def on_setup_start(self, context: CallbackContext) -> None:
        """Says on rank 0 what is not tried any more."""
        self._run_dir, self._trains = broadcast_from_rank0(context.run_dir), False
        if dist.get_rank() == 0:
            for one in remembered(self._run_dir):
                print(f"copus: ran out of memory before, and is not changed to: {one}", flush=True)

    def on_train_step_start(self, context: CallbackContext) -> None:
        self._trains = True

    def on_train_step_end(self, context: CallbackContext) -> None:
        self._trains = False

    def on_train_error(self, context: CallbackContext, error: BaseException) -> None:
        """Appends a line, on this rank alone."""
        if self._run_dir is None or not self._trains or not is_out_of_memory(error):
            return
        micro, batch = context.micro_batch_size, context.global_batch_size
        assert micro is not None and batch is not None
        config = config_of(context)
        one = TooLarge.of(
            configuration_of_run(config, micro, batch),
            config.batch.seq_length,
            of_host=is_of_host(error),
        )
        logger.error("no memory left: %s", one)
        append_lines(self._run_dir / FILE, json.dumps(asdict(one)) + "\n")
