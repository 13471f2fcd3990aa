"""Batches and lengths, learning rate and optimizer, number formats."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.trainer.config.fields import derived, option

AUTO = "auto"
"""Stands for a global batch size that is still to be chosen."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How much is trained on, in which portions, and when the run stops."""

    seq_length: int = option(None, required=True)
    """Tokens per sample."""
    micro_batch_size: int = option(None, required=True)
    """Samples of one forward pass on one data-parallel rank."""
    allow_uneven_micro_batches: bool = option(False)
    """Allow a smaller last micro-batch on every replica. The global batch then need not be a
    multiple of micro-batch size x data parallel size. Needs pipeline size 1."""
    global_batch_size: int = option(None, word=AUTO)
    """Samples of one optimizer step, or auto: with --copus the planner chooses the batch of the
    first launch, and later ones keep it. Default: micro-batch size x data parallel size."""
    rampup_batch_size: tuple[int, ...] | None = option(None, nargs=3)
    """Three numbers: the first batch, the increment, and the samples over which the batch grows to
    --global-batch-size."""
    step_batch_size_schedule: str | None = option(None)
    """Batch sizes by tokens trained, such as "0:768 250B:1536". Thresholds take K, M, B or T."""
    train_iters: int | None = option(None)
    """Length of training in iterations. Converted once to samples at --global-batch-size, or at
    the sizes of --rampup-batch-size or --step-batch-size-schedule."""
    train_samples: int = option(None)
    """Length of training in samples."""
    eval_iters: int = option(100)
    """Validation batches of one evaluation."""
    eval_global_batch_size: int | None = option(None)
    """Samples of one validation batch. Default: the global batch size of the first launch."""
    eval_interval: int | None = option(None)
    """Iterations between two evaluations. Default: none during training."""
    skip_train: bool = option(False)
    """Evaluate only."""
    iterations_to_skip: tuple[int, ...] = option((), nargs="+")
    """Iterations whose samples are consumed without training on them."""
    exit_interval: int | None = option(None)
    """Save and leave after an iteration that is a multiple of this."""
    exit_duration_in_mins: int | None = option(None)
    """Save and leave after this many minutes."""
    exit_signal_handler: bool = option(False)
    """Accepted. SIGTERM, SIGUSR1, SIGHUP, Ctrl-C and --exit-signal save and stop the run always."""
    exit_signal: str = option("SIGTERM")
    """Name of one more signal that saves and stops the run."""
    calculate_per_token_loss: bool = option(False)
    """Average the loss over the tokens of the global batch instead of over micro-batches."""
    initial_global_batch_size: int = derived(None)
    """Samples per step at the first launch: the unit in which iterations were converted to
    samples."""
    eval_samples: int = derived(None)
    """Validation samples of the whole run."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and the schedules of learning rate and weight decay."""

    optimizer: str = option("adam", choices=("adam", "sgd", "muon", "dist_muon"))
    """Optimizer. dist_muon is muon."""
    lr: float = option(None, required=True)
    """Highest learning rate."""
    min_lr: float = option(0.0)
    """Lowest learning rate of the decay."""
    decoupled_lr: float | None = option(None)
    """Highest learning rate of the word embedding and the output layer. Default: --lr."""
    decoupled_min_lr: float | None = option(None)
    """Lowest learning rate of the word embedding and the output layer. Default: --min-lr."""
    lr_decay_style: str = option(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """Shape of the decay from --lr to --min-lr."""
    lr_decay_iters: int | None = option(None)
    """Length of the decay in iterations. Converted once to samples. Default: the length of
    training."""
    lr_decay_samples: int = option(None)
    """Length of the decay in samples. Default: the length of training."""
    lr_warmup_iters: int = option(0)
    """Length of the linear warm-up in iterations. Converted once to samples."""
    lr_warmup_samples: int = option(0)
    """Length of the linear warm-up in samples."""
    lr_warmup_fraction: float | None = option(None)
    """Length of the linear warm-up as a share of the decay length."""
    lr_warmup_init: float = option(0.0)
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: str = option(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    """Shape of the last part of the WSD schedule."""
    lr_wsd_decay_iters: int | None = option(None)
    """Length of the last part of the WSD schedule in iterations. Converted once to samples."""
    lr_wsd_decay_samples: int | None = option(None)
    """Length of the last part of the WSD schedule in samples."""
    override_opt_param_scheduler: bool = option(
        False, "--override-opt_param-scheduler", "--override-opt-param-scheduler"
    )
    """On resume, use the schedule of the command line in place of the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = option(
        False, "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"
    )
    """On resume, use the checkpoint's schedule without comparing it to the command line."""
    adam_beta1: float = option(0.9)
    """Decay of the running mean of gradients."""
    adam_beta2: float = option(0.999)
    """Decay of the running mean of squared gradients."""
    adam_eps: float = option(1e-8)
    """Added to the denominator of Adam."""
    weight_decay: float = option(0.01)
    """Decoupled weight decay."""
    start_weight_decay: float = option(None)
    """Weight decay at the start. Default: --weight-decay."""
    end_weight_decay: float = option(None)
    """Weight decay at the end. Default: --weight-decay."""
    weight_decay_incr_style: str = option("constant", choices=("constant", "linear", "cosine"))
    """Shape of the way from start to end weight decay."""
    apply_wd_to_qk_layernorm: bool = option(False)
    """Apply weight decay to the weights of --qk-layernorm, too."""
    clip_grad: float = option(1.0)
    """Largest global norm of the gradient. 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of weights and gradients, and what to do with bad ones."""

    bf16: bool = option(False)
    """Compute in bfloat16."""
    fp16: bool = option(False)
    """Compute in float16, with loss scaling."""
    loss_scale: float | None = option(None)
    """Constant loss scale for fp16. Default: a dynamic one."""
    initial_loss_scale: float = option(2.0**32)
    """First value of the dynamic loss scale."""
    min_loss_scale: float = option(1.0)
    """Lowest value of the dynamic loss scale."""
    loss_scale_window: float = option(1000.0)
    """Steps without overflow before the dynamic loss scale is raised."""
    hysteresis: int = option(2)
    """Overflows before the dynamic loss scale is lowered."""
    accumulate_allreduce_grads_in_fp32: bool = option(False)
    """Add up and reduce gradients in fp32. On with bf16 unless --grad-reduce-in-bf16 is given."""
    grad_reduce_in_bf16: bool = option(False)
    """Add up and reduce gradients in bfloat16."""
    check_for_nan_in_loss_and_grad: bool = option(True, "--no-check-for-nan-in-loss-and-grad")
    """Accepted. A gradient that is not finite always skips its step."""
    fp8: str | None = option(None, "--fp8-format", choices=("e4m3", "hybrid"))
    """Compute matrix products in 8 bits: e4m3 everywhere, or hybrid with e5m2 for gradients. Needs
    Transformer Engine and a GPU."""
    fp8_recipe: str = option(
        "delayed", choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom")
    )
    """How --fp8-format scales its values. custom is refused."""
    fp8_margin: int = option(0)
    """Powers of two between the largest value and the largest number of the format."""
    fp8_amax_history_len: int = option(1)
    """Steps that --fp8-recipe delayed remembers."""
    fp8_amax_compute_algo: str = option("most_recent", choices=("most_recent", "max"))
    """Which of these steps sets the scale: the last one, or the one with the largest value."""
    fp8_wgrad: bool = option(True, "--no-fp8-wgrad", "--disable-fp8-wgrad")
    """Compute the gradients of weights in 8 bits, too."""
    fp8_param_gather: bool = option(False)
    """Accepted with --fp8-format. Weights are stored and gathered in the format of the model."""
    first_last_layers_bf16: bool = option(False)
    """Leave the first and last layers out of --fp8-format."""
    num_layers_at_start_in_bf16: int = option(1)
    """How many first layers --first-last-layers-bf16 leaves out."""
    num_layers_at_end_in_bf16: int = option(1)
    """How many last layers --first-last-layers-bf16 leaves out."""
    params_dtype: str = derived(None)
    """Format of the weights: fp32, bf16 or fp16."""
