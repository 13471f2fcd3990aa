"""The flags of the controller."""

from __future__ import annotations

from dataclasses import dataclass

from copus_ext.goodput.objectives import OBJECTIVES
from copus_ext.goodput.policies import POLICIES
from megatron.training.config.fields import option

# Defaults that depend on the run or on another flag; every other one stands at its flag.
NOISE_SCALE_MULTIPLIER, PUBLISHED_NOISE_SCALE_MULTIPLIER = 4.0, 2.0
"""c of ours, and of what is published (docs/decisions/020)."""
MOST_GROWTH, MOST_SHRINKING = 64, 8
"""Times that the batch may grow, or shrink where that is allowed, from the first."""
DECISION_STEPS = 20
"""Steps between two decisions."""


@dataclass(frozen=True, kw_only=True)
class CopusConfig:
    """What `--copus` does. Without it the trainer is the plain one."""

    copus: bool = option(False)
    """Measure the gradient noise scale while training, and let the batch follow it."""
    copus_mode: str = option("act", choices=("off", "observe", "act"))
    """act: change batch, micro-batch and, with --copus-layouts all, layout. observe: change
    nothing, and record what act would have done. off: as without --copus."""
    copus_policy: str = option("adaptive", choices=POLICIES)
    """How the batch is chosen. adaptive weighs every configuration by --copus-objective; the
    others are ways that people use or publish (docs/controller.md)."""
    copus_objective: str = option("goodput", choices=OBJECTIVES)
    """What adaptive maximises: goodput is T/(B + Phi), copus T sqrt(B)/(B + Phi), lr_model takes
    the learning rate into account."""
    copus_switch_rule: str = option("forward", choices=("forward", "paper"))
    """forward: a gain must be sure, and pay for its pause over the rest of the run. paper: it must
    be a tenth."""
    copus_noise_scale_multiplier: float | None = option(
        None, "--copus-noise-scale-multiplier", "--copus-calibration"
    )
    """c: the critical batch size, Phi, is this times the measured noise scale. Default: 4; 2 with
    the objective copus, and with the policies that are published so."""
    copus_interval: float | None = option(None)
    """Tokens between two decisions. Default: those of 20 steps."""
    copus_min_global_batch_size: int | None = option(None)
    """Smallest batch to choose. Default: the first, or an eighth of it with
    --copus-allow-shrink."""
    copus_max_global_batch_size: int | None = option(None)
    """Largest batch to choose. Default: 64 times the first."""
    copus_batch_grid: str | None = option(None)
    """Further batches to choose from, such as 24,48. Default: the first batch times powers of
    two."""
    copus_layouts: str = option("current", choices=("current", "all"))
    """Layouts to choose from: the one of the flags, or all that these ranks can have."""
    copus_relayout: str = option("inprocess", choices=("inprocess", "relaunch"))
    """How to change the layout. inprocess: in the running processes, from memory to memory.
    relaunch: save, leave, and be started again by the launcher."""
    copus_prebuild: int = option(0)
    """Other layouts whose process groups are kept, or built while training: leaves them out of the
    pause. Each costs its sockets and threads, with NCCL also memory."""
    copus_verify_switch: str = option("full", choices=("full", "sample"))
    """After a change of layout compare all tensors with those before, or a sixteenth of them."""
    copus_switch_cost_s: float | None = option(None)
    """Seconds that a change of layout is taken to cost before one was measured. Default: from the
    size of the state and the network; 60 for a relaunch."""
    copus_switch_checkpoint_tokens: float | None = option(None)
    """Before a change of layout save first if the last checkpoint is more tokens old. Default:
    never."""
    copus_allow_shrink: bool = option(False)
    """Let the batch become smaller when it has surely been too large for long."""
    copus_lr_rule: str = option("sqrt", choices=("sqrt", "linear", "none"))
    """How the learning rate goes with the batch, from the reference batch on."""
    copus_lr_ramp_steps: int | None = option(None)
    """Steps over which the learning rate follows a larger batch. Default: 1/(1 - beta2), at most
    100."""
    copus_weight_decay_rule: str = option("tokens", choices=("tokens", "const"))
    """tokens: weight decay keeps what it takes per token. const: it stays."""
    copus_beta2_rule: str = option("const", choices=("const", "tokens"))
    """const: beta2 stays. tokens: it keeps its half-life in tokens."""
    copus_reference_batch_size: int | None = option(None)
    """Batch for which --lr and --weight-decay were chosen. Default: the first batch."""
    copus_max_micro_batch_size: int = option(64)
    """Largest micro-batch to choose."""
    copus_cluster: str | None = option(None)
    """What the planner takes the machine for: KIND:GPUS such as h100-80g:64, or a JSON file.
    Default: what this process sees."""
    copus_profile: str | None = option(None)
    """Times that tools/profile_layouts.py measured on this machine."""
    copus_norm_test_eta: float = option(0.5)
    """With --copus-policy norm_test: grow while the gradient's variance exceeds eta^2 |g|^2."""
    copus_doubling_first_tokens: float | None = option(None)
    """With --copus-policy doubling: tokens before the first doubling. Default: an eighth of the
    run."""
    copus_doubling_ratio: float = option(3.0)
    """With --copus-policy doubling: each further one after this times as many tokens."""
    copus_gns_estimator: str = option("auto", choices=("auto", "micro", "rank", "half"))
    """Small gradients to compare with the whole batch's: of each micro-batch, of each data-parallel
   rank, or of the first half of the micro-batches; auto takes the first of these that the layout
   allows."""
    copus_gns_interval: int | None = option(None)
    """Steps between measurements of the noise scale. Default: 1 in the beginning, up to 16 as the
    average spans more steps, so that 64 measurements are in a half-life."""
    copus_gns_half_life_tokens: float | None = option(None)
    """Tokens after which a measurement counts half. Default: 0.44 million or a twentieth of the
    tokens trained, whichever is more, at most a quarter of them, at least 16 measurements."""
