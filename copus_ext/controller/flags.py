"""The controller's settings: a dozen flags, and a file for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.goodput.objectives import OBJECTIVES
from copus_ext.goodput.policies import POLICIES
from megatron.training.common.errors import UsageError
from megatron.training.config.arguments import nearest_flag, setting_name
from megatron.training.config.fields import OptionSpec, option, option_specs

# Defaults that depend on the run or on another flag; every other one stands at its flag.
NOISE_SCALE_MULTIPLIER, PUBLISHED_NOISE_SCALE_MULTIPLIER = 4.0, 2.0
"""c of ours, and of what is published (docs/decisions/020)."""
MOST_GROWTH, MOST_SHRINKING = 64, 8
"""Times that the batch may grow, or shrink where that is allowed, from the first."""
DECISION_STEPS = 20
"""Steps between two decisions."""

FILE_FLAG = "--copus-config"


def _setting(default: Any, **more: Any) -> Any:
    """A field whose place is the file of `--copus-config`."""
    return option(default, in_file=FILE_FLAG, **more)


@dataclass(frozen=True, kw_only=True)
class CopusConfig:
    """What `--copus` does. Without it the trainer is the plain one."""

    copus: bool = option(False)
    """Measure the gradient noise scale while training, and let the batch follow it."""
    copus_mode: str = option("act", choices=("off", "observe", "act"))
    """act: change batch, micro-batch and, with --copus-layouts all, layout. observe: change
    nothing, and record what act would have done. off: as without --copus."""
    copus_config: str | None = option(None)
    """YAML file with further settings of the controller (docs/copus.yaml lists all). A flag that is
    given wins over the file."""
    copus_policy: str = option("adaptive", choices=POLICIES)
    """How the batch is chosen. adaptive weighs every configuration by `objective`; the
    others are ways that people use or publish (docs/controller.md)."""
    copus_objective: str = _setting("goodput", choices=OBJECTIVES)
    """What adaptive maximises: goodput is T/(B + Phi), copus T sqrt(B)/(B + Phi), lr_model takes
    the learning rate into account."""
    copus_switch_rule: str = _setting("forward", choices=("forward", "paper"))
    """forward: a gain must be sure, and pay for its pause over the rest of the run. paper: it must
    be a tenth."""
    copus_noise_scale_multiplier: float | None = option(None, old_strings=("--copus-calibration",))
    """c: the critical batch size, Phi, is this times the measured noise scale. Default: 4; 2 with
    the objective copus, and with the policies that are published so."""
    copus_interval: float | None = option(None)
    """Tokens between two decisions. Default: those of 20 steps."""
    copus_min_global_batch_size: int | None = option(None)
    """Smallest batch to choose. Default: the first, or an eighth of it with
    allow_shrink."""
    copus_max_global_batch_size: int | None = option(None)
    """Largest batch to choose. Default: 64 times the first."""
    copus_batch_grid: str | None = _setting(None)
    """Further batches to choose from, such as 24,48. Default: the first batch times powers of
    two."""
    copus_layouts: str = option("current", choices=("current", "all"))
    """Layouts to choose from: the one of the flags, or all that these ranks can have."""
    copus_relayout: str = option("inprocess", choices=("inprocess", "relaunch"))
    """How to change the layout. inprocess: in the running processes, from memory to memory.
    relaunch: save, leave, and be started again by the launcher."""
    copus_prebuild: int = _setting(0)
    """Other layouts whose process groups are kept, or built while training: leaves them out of the
    pause. Each costs its sockets and threads, with NCCL also memory."""
    copus_verify_switch: str = _setting("full", choices=("full", "sample"))
    """After a change of layout compare all tensors with those before, or a sixteenth of them."""
    copus_switch_cost_s: float | None = _setting(None)
    """Seconds that a change of layout is taken to cost before one was measured. Default: from the
    size of the state and the network; 60 for a relaunch."""
    copus_switch_checkpoint_tokens: float | None = _setting(None)
    """Before a change of layout save first if the last checkpoint is more tokens old. Default:
    never."""
    copus_allow_shrink: bool = _setting(False)
    """Let the batch become smaller when it has surely been too large for long."""
    copus_lr_rule: str = option("sqrt", choices=("sqrt", "linear", "none"))
    """How the learning rate goes with the batch, from the reference batch on."""
    copus_lr_ramp_steps: int | None = _setting(None)
    """Steps over which the learning rate follows a larger batch. Default: 1/(1 - beta2), at most
    100."""
    copus_weight_decay_rule: str = _setting("tokens", choices=("tokens", "const"))
    """tokens: weight decay keeps what it takes per token. const: it stays."""
    copus_beta2_rule: str = _setting("const", choices=("const", "tokens"))
    """const: beta2 stays. tokens: it keeps its half-life in tokens."""
    copus_reference_batch_size: int | None = _setting(None)
    """Batch for which --lr and --weight-decay were chosen. Default: the first batch."""
    copus_max_micro_batch_size: int = _setting(64)
    """Largest micro-batch to choose."""
    copus_cluster: str | None = option(None)
    """What the planner takes the machine for: KIND:GPUS such as h100-80g:64, or a JSON file.
    Default: what this process sees."""
    copus_profile: str | None = option(None)
    """Times that tools/profile_layouts.py measured on this machine."""
    copus_norm_test_eta: float = _setting(0.5)
    """With --copus-policy norm_test: grow while the gradient's variance exceeds eta^2 |g|^2."""
    copus_doubling_first_tokens: float | None = _setting(None)
    """With --copus-policy doubling: tokens before the first doubling. Default: an eighth of the
    run."""
    copus_doubling_ratio: float = _setting(3.0)
    """With --copus-policy doubling: each further one after this times as many tokens."""
    copus_gns_estimator: str = _setting("auto", choices=("auto", "micro", "rank", "half"))
    """Small gradients to compare with the whole batch's: of each micro-batch, of each data-parallel
   rank, or of the first half of the micro-batches; auto takes the first of these that the layout
   allows."""
    copus_gns_interval: int | None = _setting(None)
    """Steps between measurements of the noise scale. Default: 1 in the beginning, up to 16 as the
    average spans more steps, so that 64 measurements are in a half-life."""
    copus_gns_half_life_tokens: float | None = _setting(None)
    """Tokens after which a measurement counts half. Default: 0.44 million or a twentieth of the
    tokens trained, whichever is more, at most a quarter of them, at least 16 measurements."""


def controller_flags(args: Any) -> CopusConfig:
    """The controller's settings of a command line and of its `--copus-config` file.

    Args:
        args: parsed flags. Those named in `explicit_flags` win over the file; without that
            attribute (Megatron-LM's own parser) those that differ from their default do.

    Raises:
        UsageError: the file cannot be read, or a setting in it makes no sense.
    """
    values = {spec.dest: getattr(args, spec.dest) for spec in option_specs(CopusConfig)}
    if values["copus_config"] is None:
        return CopusConfig(**values)
    given = getattr(args, "explicit_flags", None)
    if given is None:
        defaults = CopusConfig()
        given = {name for name, value in values.items() if value != getattr(defaults, name)}
    read = read_settings(Path(values["copus_config"]))
    return CopusConfig(**values | {name: v for name, v in read.items() if name not in given})


def read_settings(path: Path) -> dict[str, Any]:
    """Reads a file of settings: the fields that it sets, by name.

    Raises:
        UsageError: one line that names the file, the setting and the fix.
    """
    import yaml

    where = f"{FILE_FLAG} {path}"
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{where} is no YAML: {' '.join(str(error).split())}") from None
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UsageError(f"{where}: write one `name: value` in each line")
    known = settings_by_name()
    read = {}
    for name, value in found.items():
        plain = str(name).replace("-", "_").removeprefix("copus_")
        if plain not in known:
            near = nearest_flag(plain, list(known))
            fix = f"did you mean {near}?" if near else "remove it; docs/copus.yaml lists all"
            raise UsageError(f"{where}: unknown setting {name}; {fix}")
        try:
            read[known[plain].dest] = _value(known[plain], value)
        except ValueError as error:
            raise UsageError(f"{where}: {name}: {error}") from None
    return read


def settings_by_name() -> dict[str, OptionSpec]:
    """What a file may set, by the name that it has there."""
    specs = {s.dest.removeprefix("copus_"): s for s in option_specs(CopusConfig)}
    return {name: spec for name, spec in specs.items() if name not in ("copus", "config")}


def _value(spec: OptionSpec, value: Any) -> Any:
    """A value of a file as its field wants it; null is the default.

    Raises:
        ValueError: it is no value of this field.
    """
    if value is None:
        return spec.default
    if spec.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{value!r} is neither true nor false")
        return value
    if isinstance(value, list):
        value = ",".join(map(str, value))
    if value is False and "off" in (spec.choices or ()):
        value = "off"  # YAML reads that word as false
    if isinstance(value, bool | Mapping):
        raise ValueError(f"{value!r} is no {spec.kind.__name__}")
    return spec.read(str(value))


def name_of(field: str) -> str:
    """What a message calls a setting: its flag, or its name in the file."""
    spec = next(spec for spec in option_specs(CopusConfig) if spec.dest == field)
    return spec.strings[0] if spec.in_file is None else f"{FILE_FLAG}: {setting_name(spec)}"
