"""The process: device, seed, folders, housekeeping."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.trainer.config.fields import derived, option


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """What does not change the model and is not about saving or logging."""

    device: str = option("auto", choices=("auto", "cuda", "cpu"))
    """Where to compute. auto takes CUDA if there is a GPU."""
    run_dir: str | None = option(None)
    """Folder for the resolved configuration and the metrics. Default: --save, else
    --tensorboard-dir, else a folder of runs/ named by the time in UTC."""
    force_unlock: bool = option(False)
    """Write into a directory whose lock another run has left behind: one that died on another node.
    Waits until that run has shown no sign of life for two minutes."""
    seed: int = option(1234)
    """Seed of initial weights, data order and dropout."""
    deterministic_mode: bool = option(False)
    """Use only kernels that give the same bits every time. On GPUs this sets NCCL_ALGO to Ring,
    unless it has a value."""
    manual_gc: bool = option(False)
    """Collect garbage at chosen iterations only."""
    manual_gc_interval: int = option(0)
    """Iterations between two collections with --manual-gc; 0 means never."""
    manual_gc_eval: bool = option(True, "--no-manual-gc-eval", "--disable-manual-gc-eval")
    """Collect garbage around evaluations with --manual-gc."""
    empty_unused_memory_level: int = option(0, choices=(0, 1, 2))
    """Empty the CUDA cache: 0 never, 1 before each optimizer step, 2 after it too."""
    ignored_flags: tuple[str, ...] = derived(())
    """Flags of Megatron-LM that were given and have no effect here."""
    notes: tuple[str, ...] = derived(())
    """What was derived otherwise than the flags say, one line each."""
