"""Saving and loading."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.trainer.config.fields import option


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, how often, and how strictly they are read."""

    save: str | None = option(None)
    """Folder to save checkpoints in."""
    load: str | None = option(None)
    """Folder to load the latest checkpoint from. An empty or missing one starts from scratch."""
    save_interval: int | None = option(None, "--save-interval", "--persistent-save-interval")
    """Iterations between two checkpoints. Default: only when the run ends."""
    save_retain_interval: int | None = option(None)
    """Keep only checkpoints at multiples of this many iterations, and the latest."""
    async_save: bool = option(False)
    """Write checkpoints while training goes on."""
    ckpt_format: str = option(
        "torch_dist", choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor")
    )
    """Accepted, except for fsdp_dtensor. Checkpoints are always saved and loaded as torch_dist."""
    ckpt_fully_parallel_save: bool = option(
        True, "--no-ckpt-fully-parallel-save", "--disable-ckpt-fully-parallel-save"
    )
    """Share out writing over the data-parallel ranks."""
    dist_ckpt_optim_fully_reshardable: bool = option(False)
    """Accepted. The optimizer is always saved in the format that loads under any layout."""
    distrib_optim_fully_reshardable_mem_efficient: bool = option(False)
    """Gather the optimizer state on one data-parallel rank to save host memory."""
    use_checkpoint_args: bool = option(False)
    """Take the model shape from the checkpoint where no flag gives it."""
    no_load_optim: bool = option(False)
    """Do not load the optimizer."""
    no_save_optim: bool = option(False)
    """Do not save the optimizer."""
    no_load_rng: bool = option(False)
    """Accepted. Random numbers follow from seed and consumed samples, so none are stored."""
    no_save_rng: bool = option(False)
    """Accepted. Random numbers follow from seed and consumed samples, so none are stored."""
    finetune: bool = option(False)
    """Load weights only and start counting at iteration 0."""
    ckpt_step: int | None = option(None)
    """Load the checkpoint of this iteration instead of the latest."""
    exit_on_missing_checkpoint: bool = option(False)
    """Leave with an error if --load has no checkpoint."""
    verify_checkpoint: bool = option(True, "--no-verify-checkpoint")
    """Compare the checksums of a checkpoint when loading it."""
    ckpt_fallback: bool = option(True, "--no-ckpt-fallback")
    """If the latest checkpoint is damaged, half-written or missing, load the newest complete one
    before it."""
    ckpt_trust_unverified: bool = option(False)
    """Load a checkpoint of COPUS without a complete manifest.json. Such a checkpoint counts as
    damaged otherwise, because changed bytes would go unnoticed."""
    allow_changed_data: bool = option(False)
    """Resume although the data sets differ from those that the checkpoint was trained on."""
    on_save_failure: str = option("stop", choices=("stop", "continue"))
    """What to do after three failed saves in a row."""
