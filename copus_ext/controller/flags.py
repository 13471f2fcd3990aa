"""The controller's settings: a dozen flags, and a file for the rest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from copus_ext.gns.estimators import ESTIMATORS
from copus_ext.goodput.policies import POLICIES
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.outside import parse_yaml
from megatron.trainer.config.fields import OptionSpec, option, option_specs
from megatron.trainer.config.flag_names import nearest_flag, setting_name

# Defaults that depend on the run or on another flag; every other one stands at its flag.
NOISE_SCALE_MULTIPLIER, PUBLISHED_NOISE_SCALE_MULTIPLIER = 8.0, 2.0
"""c of ours, and of what is published (docs/decisions/032, 020)."""
MAX_GROWTH, MAX_SHRINKING = 64, 64
"""Times that the batch may grow, or shrink where that is allowed, from the first."""
DECISION_STEPS = 20
"""Steps between two decisions."""

PAPER = "paper"
"""What users may call the policy `copus`, where its extra is there."""
_PAPER = (PAPER,) if "copus" in POLICIES else ()
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
    """YAML file with the controller's other settings. docs/copus.yaml lists all. A flag on the
    command line wins over the file."""
    copus_policy: str = option("adaptive", choices=(*POLICIES, *_PAPER))
    """How the batch is chosen. adaptive takes the configuration that is expected to finish the run
    soonest. paper is arXiv 2604.26687 (also called copus). docs/controller.md and
    docs/baselines.md describe the others."""
    copus_noise_scale_multiplier: float | None = option(None)
    """The critical batch size is this times the measured noise scale. Default: 8; 2 with the
    published policies. For adaptive it is a first guess, good to a factor of 3."""
    copus_interval: float | None = option(None)
    """Tokens between two decisions. Default: the tokens of 20 steps."""
    copus_min_global_batch_size: int | None = option(None)
    """Smallest batch to choose. Default: a 64th of the first; the first where the batch may not
    shrink."""
    copus_max_global_batch_size: int | None = option(None)
    """Largest batch to choose. Default: 64 times the first; the end of --rampup-batch-size."""
    copus_batch_grid: str | None = _setting(None)
    """Further batches to choose from, such as 24,48. Default: the first batch times powers of
    two."""
    copus_layouts: str = option("current", choices=("current", "all"))
    """Layouts to choose from: the current one, or all that these ranks can have."""
    copus_relayout: str = option("inprocess", choices=("inprocess", "relaunch"))
    """How to change the layout. inprocess: in the running processes, from memory to memory.
    relaunch: save, exit, and let the launcher start the run again."""
    copus_prebuild: int = _setting(0)
    """Number of other layouts whose process groups stay built. This shortens the pause of a change.
    Each costs sockets and threads, and memory with NCCL."""
    copus_verify_relayout: str = _setting("full", choices=("full", "sample"))
    """After a change of layout compare all elements with those before (full), or a sixteenth
    (sample)."""
    copus_relayout_cost_s: float | None = _setting(None)
    """Assumed seconds of a change of layout before the first was measured. Default: from the bytes
    that have to move and the links; 60 for a relaunch."""
    copus_relayout_checkpoint_tokens: float | None = _setting(None)
    """Save before a change of layout if the last checkpoint is more tokens old than this. Default:
    never."""
    copus_allow_shrink: bool | None = _setting(None)
    """Let the batch shrink. Default: yes with adaptive, no with the published policies."""
    copus_anneal_by_batch: float = _setting(0.0)
    """For adaptive and --lr-decay-style constant: over this part of the run, at its end, the batch
    grows as far as the learning rate would fall to 0, and the rate stays. 0: no such growth."""
    copus_lr_rule: str = option("sqrt", choices=("sqrt", "linear", "none"))
    """How the learning rate scales with the batch, relative to the reference batch."""
    copus_lr_ramp_steps: int | None = _setting(None)
    """Steps over which the learning rate follows a larger batch. Default: 1/(1 - beta2), at most
    100 and 5 % of the decay."""
    copus_weight_decay_rule: str = _setting("tokens", choices=("tokens", "const"))
    """tokens: the decay per token stays the same. const: the decay per step does."""
    copus_beta2_rule: str = _setting("const", choices=("const", "tokens"))
    """const: beta2 stays the same. tokens: its half-life in tokens does."""
    copus_reference_batch_size: int | None = _setting(None)
    """Batch for which --lr and --weight-decay were chosen. Default: the first batch; that of
    --rampup-batch-size at the same sample."""
    copus_max_micro_batch_size: int = _setting(64)
    """Largest micro-batch to choose."""
    copus_cluster: str | None = option(None)
    """The machine, for the planner: KIND:GPUS such as h100-80g:64, or a JSON file. Default: what
    this process sees."""
    copus_profile: str | None = option(None)
    """Step times of this machine, measured by the command profile-layouts."""
    copus_doubling_first_tokens: float | None = _setting(None)
    """For the policy doubling: tokens before the first doubling. Default: an eighth of the run."""
    copus_doubling_ratio: float = _setting(3.0)
    """For the policy doubling: each doubling comes after this times the tokens of the one
    before."""
    copus_gns_estimator: str = _setting("auto", choices=("auto", *ESTIMATORS))
    """Small gradients to compare with the whole batch's: of each micro-batch, of each data-parallel
    rank, or of half of the micro-batches. auto takes the first of these that the layout allows."""
    copus_gns_interval: int | None = _setting(None)
    """Steps between measurements of the noise scale. Default: 1 at first, later up to 16, so that a
    half-life holds 32 measurements."""
    copus_gns_half_life_tokens: float | None = _setting(None)
    """Half-life of a measurement in tokens. Default: 0.44 million or a twentieth of the tokens
    trained, whichever is more. It is at most a quarter of them and at least 16 measurements."""

    def __post_init__(self) -> None:
        if self.copus_policy == PAPER:
            object.__setattr__(self, "copus_policy", "copus")


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
        given = given_by_value(args)
    read = read_settings(Path(values["copus_config"]))
    return CopusConfig(**values | {name: v for name, v in read.items() if name not in given})


@contextlib.contextmanager
def naming_the_file(flags: CopusConfig) -> Iterator[None]:
    """Names the file of settings in a refusal of something that it sets."""
    try:
        yield
    except UsageError as error:
        if flags.copus_config is None:
            raise
        where, line = f"{FILE_FLAG} {flags.copus_config}", str(error)
        if f"{FILE_FLAG}: " in line:
            raise UsageError(line.replace(f"{FILE_FLAG}: ", f"{where}: ")) from None
        read = read_settings(Path(flags.copus_config))
        own = {spec.dest: spec.strings[0] for spec in option_specs(CopusConfig)}
        of_file = [
            own[name]
            for name, value in read.items()
            if value == getattr(flags, name) and re.search(rf"{own[name]}(?![-\w])", line)
        ]
        if not of_file:
            raise
        raise UsageError(f"{line}; {where} sets {' and '.join(of_file)}") from None


def given_by_value(args: Any) -> set[str]:
    """The controller's fields whose values are not the default ones: those that were given, as far
    as the arguments of a parser that does not say it can tell. A switch that is off was not."""
    values = ((spec, getattr(args, spec.dest)) for spec in option_specs(CopusConfig))
    return {spec.dest for spec, value in values if value is not False and value != spec.default}


def check_has_copus(given: Collection[str], *, is_on: bool) -> None:
    """Refuses the controller's flags in a run without one, which would ignore them.

    Args:
        given: names of the fields whose flags stand on the command line, whatever their values.
        is_on: whether `--copus` does.

    Raises:
        UsageError: one line with all of these flags, and the fix.
    """
    specs = option_specs(CopusConfig)
    idle = [spec.strings[0] for spec in specs if spec.dest in given and spec.dest != "copus"]
    if idle and not is_on:
        it = "it" if len(idle) == 1 else "them"
        raise UsageError(
            f"{', '.join(idle)}: no effect without --copus; add --copus, or remove {it}"
        )


def read_settings(path: Path) -> dict[str, Any]:
    """Reads a file of settings: the fields that it sets, by name.

    Raises:
        UsageError: one line that names the file, the setting and the fix.
    """
    where = f"{FILE_FLAG} {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} cannot be read: {error}") from None
    try:
        found = parse_yaml(text)
    except ValueError as error:
        raise UsageError(f"{where} is not valid YAML: {error}") from None
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
            fix = f"did you mean {near}?" if near else f"remove it; there are {', '.join(known)}"
            raise UsageError(f"{where}: unknown setting {name}; {fix}")
        if known[plain].dest in read:
            raise UsageError(f"{where}: {name} is {plain}, which stands there twice; keep one")
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
        ValueError: it is not a value of this field.
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
