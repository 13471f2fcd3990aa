"""Merges the flags of this launch with the checkpoint that it resumes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split

from megatron.trainer.checkpoint.group_values import kept_flags
from megatron.trainer.checkpoint.load import NEW_IN_USE, NEW_IN_WEIGHTS, NEW_RATES, Stored
from megatron.trainer.common.errors import UsageError
from megatron.trainer.common.extras import as_given, settled
from megatron.trainer.common.program import other_command
from megatron.trainer.common.step_settings import StepSettings
from megatron.trainer.config import GROUPS, Config
from megatron.trainer.config.derive import fill_in
from megatron.trainer.config.draft import Draft, flag_of
from megatron.trainer.config.fields import option_specs
from megatron.trainer.config.layout_rules import batch_problems
from megatron.trainer.config.lengths import apply_checkpoint_lengths
from megatron.trainer.config.moe_flags import layers_with_experts
from megatron.trainer.config.vocabulary import pad_vocab_size, padding_unit

# Fields in which a resumed run must agree with its checkpoint: always, unless it is finetuned, and
# unless the learning rate schedule is overridden.
_SHAPE = """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    position_embedding_type normalization swiglu add_bias_linear add_qkv_bias qk_layernorm
    untie_embeddings_and_output_weights max_position_embeddings"""
_RUN = """seq_length seed data_path split rotary_base rotary_percent use_rope_scaling
    rope_scaling_factor layernorm_epsilon squared_relu"""
_OF_OPTIMIZER = ("optimizer", "use_distributed_optimizer")
"""Those that count where the optimizer's state is loaded; the second one with Adam alone, since the
others keep their state whole."""
_OF_DATA = ("data_path", "split")
"""Those of a checkpoint that knows its data sets by their contents and use: the same may lie
elsewhere. Others are told when they have been read (`fingerprint.changes`)."""
_SCHEDULE = "lr min_lr lr_decay_style start_weight_decay end_weight_decay"
_MUST_MATCH = (*_SHAPE.split(), *NEW_IN_WEIGHTS)
_MUST_MATCH_TO_CONTINUE = (*_RUN.split(), *NEW_IN_USE)
_MUST_MATCH_WITHOUT_OVERRIDE = (*_SCHEDULE.split(), *NEW_RATES)
# Fields that change nothing while the flag behind them is off in both.
_OF_LATENT_ATTENTION = """q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    rotary_scaling_factor mscale mscale_all_dim"""
_OF_EXPERTS = [name for name in (*NEW_IN_WEIGHTS, *NEW_IN_USE) if name.startswith("moe_")]
_COUNTS_ONLY_WITH = {
    **dict.fromkeys(_OF_EXPERTS, "num_experts"),
    **dict.fromkeys(_OF_LATENT_ATTENTION.split(), "multi_latent_attention"),
    "mtp_loss_scaling_factor": "mtp_num_layers",
    "rope_scaling_factor": "use_rope_scaling",
}
_OPTIONS = {spec.dest: spec for group in GROUPS.values() for spec in option_specs(group)}


def merge_resume_config(
    config: Config,
    stored: Stored | None,
    *,
    vocab_size: int,
    tensor_parallel_sizes: Iterable[int] = (),
) -> Config:
    """The configuration to run with.

    Args:
        config: as resolved from the flags.
        stored: the checkpoint to continue from, or None.
        vocab_size: tokens of the tokenizer, unpadded.
        tensor_parallel_sizes: those that the run may take besides that of the flags.

    Returns:
        `config` with what the checkpoint decides: the lengths in samples, the padded vocabulary,
        and what extras make of it.

    Raises:
        UsageError: the flags contradict the checkpoint or the vocabulary.
    """
    if stored is not None and config.optim.use_checkpoint_opt_param_scheduler:
        told = {name: stored.arguments.get(name) for name in _MUST_MATCH_WITHOUT_OVERRIDE}
        config = config.replace(**{n: value for n, value in told.items() if value is not None})
    rows = _padded_vocabulary(config, stored, vocab_size, tensor_parallel_sizes)
    config = config.replace(padded_vocab_size=rows)
    if stored is not None:
        check_same_run(config, stored)
        config = _with_kept_values(config, stored)
        if stored.lengths is not None and not config.checkpoint.finetune:
            override = config.optim.override_opt_param_scheduler
            config = apply_checkpoint_lengths(config, stored.lengths, override=override)
    # Now that the rows of the vocabulary are known.
    return settled(config, None if config.checkpoint.finetune else stored)


def _loads_state(config: Config) -> bool:
    """Whether the state of the optimizer is loaded with the weights."""
    return not (config.checkpoint.finetune or config.checkpoint.no_load_optim)


def _with_kept_values(config: Config, stored: Stored) -> Config:
    """The configuration with the hyperparameters that come with the optimizer's state, and a note
    on each that the flags have otherwise. So every later layout and checkpoint has them, too."""
    if not _loads_state(config):
        return config
    now, then = config.flat(), stored.arguments
    names = kept_flags(config.optim.optimizer)
    kept = {n: then[n] for n in names if then.get(n) is not None and then[n] != now[n]}
    notes = [
        f"{flag_of(name)} {now[name]:g} does not count: the optimizer goes on with the "
        f"{value:g} of {stored.folder}, as in Megatron-LM; --no-load-optim begins with a new state"
        for name, value in kept.items()
    ]
    return config.replace(**kept, notes=(*config.runtime.notes, *notes))


def _padded_vocabulary(
    config: Config, stored: Stored | None, vocab_size: int, tensor_parallel_sizes: Iterable[int]
) -> int:
    """Rows of the embedding: those of the checkpoint, else as the flags say.

    The number is the same for every layout that the run may take (docs/decisions/025). More rows
    would add tokens with logit 0 to every softmax and change the loss.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    asked = model.padded_vocab_size if "padded_vocab_size" in config.explicit else None
    if stored is None or stored.arguments.get("padded_vocab_size") is None:
        unit = padding_unit(
            model.make_vocab_size_divisible_by,
            {tp, *tensor_parallel_sizes},
            padded_for=model.pad_vocab_for_tensor_parallel_size,
        )
        padded = asked or pad_vocab_size(vocab_size, unit)
        if padded < vocab_size:
            raise UsageError(
                f"--padded-vocab-size {padded} is less than the {vocab_size} tokens of the "
                "tokenizer; give at least that"
            )
        return padded
    padded = int(stored.arguments["padded_vocab_size"])
    if asked not in (None, padded):
        convert = other_command("convert_checkpoint.py")
        raise UsageError(
            f"--padded-vocab-size is {asked} but checkpoint {stored.folder} has {padded} rows; "
            f"drop the flag, or change the rows with {convert} --vocab"
        )
    if vocab_size > padded:
        raise UsageError(
            f"the tokenizer has {vocab_size} tokens but checkpoint {stored.folder} has {padded} "
            "rows; give the --tokenizer-type and --tokenizer-model it was trained with"
        )
    if padded % tp:
        raise UsageError(
            f"the {padded} vocabulary rows of checkpoint {stored.folder} do not divide by "
            f"--tensor-model-parallel-size {tp}; choose another, or start the run with "
            f"--pad-vocab-for-tensor-parallel-size {tp}"
        )
    return padded


def vocabulary_line(config: Config, stored: Stored | None, *, vocab_size: int) -> str:
    """Says how many rows the embedding has, and why.

    Args:
        config: from `merge_resume_config`.
        stored: as given to it.
        vocab_size: as given to it.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    line = f"vocabulary: {vocab_size} tokens, padded to {model.padded_vocab_size} rows"
    if stored is not None and stored.arguments.get("padded_vocab_size") is not None:
        return f"{line} as in {stored.folder}"
    asked = {"padded_vocab_size", "pad_vocab_for_tensor_parallel_size"} & config.explicit
    theirs = pad_vocab_size(vocab_size, model.make_vocab_size_divisible_by * tp)
    if asked or theirs == model.padded_vocab_size:
        return line
    return (
        f"{line} under every layout; Megatron-LM pads to {theirs} at this one, as does "
        f"--padded-vocab-size {theirs}"
    )


def resume_step_settings(
    stored: StepSettings, config: Config, *, keep: bool
) -> tuple[StepSettings, list[str]]:
    """The step settings of a resumed run.

    Args:
        config: of this launch; its layout may be another.
        keep: whether a controller goes on with them.

    Returns:
        The stored settings, with a batch that the layout can divide, or none without a controller;
        and notes for the user.
    """
    plain = StepSettings()
    if stored == plain:
        return plain, []
    if not keep:
        what = [f"{k.replace('_', ' ')} {v:g}" for k, v in vars(stored).items() if v is not None]
        note = (
            f"the checkpoint was trained with {', '.join(what)}; without --copus-mode act flags "
            "count again"
        )
        return plain, [note]
    batch, micro = stored.global_batch_size, stored.micro_batch_size
    micro = micro or config.batch.micro_batch_size
    batch = batch or max(config.batch.initial_global_batch_size // config.segment.ratio, 1)
    uneven = config.batch.allow_uneven_micro_batches
    if not batch_problems(config.layout, micro, batch, uneven=uneven):
        return stored, []
    for size in range(batch, 0, -1):
        for b in range(micro, 0, -1):
            if not batch_problems(config.layout, b, size, uneven=uneven):
                note = (
                    f"batch {batch} in micro-batches of {micro} of the checkpoint becomes {size} "
                    f"in {b} on {config.layout}"
                )
                return replace(stored, global_batch_size=size, micro_batch_size=b), [note]
    return plain, [f"no batch of the checkpoint fits {config.layout}; the run uses its flags"]


def kept_sizes(settings: StepSettings, config: Config, arguments: Mapping[str, Any]) -> list[str]:
    """Notes on sizes that the user has changed since a checkpoint, with which a controller does not
    go on.

    Args:
        arguments: flags that the checkpoint was saved with.
    """
    notes = []
    more = {"global_batch_size": ", and --copus-min- and --copus-max-global-batch-size bound it"}
    for name in ("micro_batch_size", "global_batch_size"):
        kept, now = getattr(settings, name), getattr(config.batch, name)
        if config.segment.ratio > 1 or kept is None or now in (kept, arguments.get(name)):
            continue
        notes.append(
            f"{_OPTIONS[name].strings[0]} {now} does not count: the run goes on with {kept}, where "
            f"the controller left it; --copus-mode observe goes by the flag{more.get(name, '')}"
        )
    return notes


def check_same_run(config: Config, stored: Stored) -> None:
    """Refuses flags that would make the checkpoint another model, or the continuation another run.

    Raises:
        UsageError: naming the flag, both values and the fix.
    """
    now = config.flat()
    then = _filled_in(as_given(stored.arguments, now), config)
    finetune = config.checkpoint.finetune

    def check(names: Iterable[str], fix: str) -> None:
        for name in names:
            if _differs(name, now, then):
                raise UsageError(
                    f"{_OPTIONS[name].strings[0]} is {now[name]!r} but checkpoint {stored.folder} "
                    f"was trained with {then[name]!r}; {fix}"
                )

    check(_MUST_MATCH, "give the same value")
    loads_state = _loads_state(config)
    if loads_state:
        check(_OF_OPTIMIZER, "give the same value, or --no-load-optim to go on with a new state")
    if not finetune:
        fix = "give the same value, or --finetune to start another run from it"
        known = _OF_DATA if stored.data is not None else ()
        check([name for name in _MUST_MATCH_TO_CONTINUE if name not in known], fix)
    if loads_state:
        _check_groups(now["decoupled_lr"], stored)
    if not (finetune or config.optim.override_opt_param_scheduler):
        check(
            _MUST_MATCH_WITHOUT_OVERRIDE,
            "give --override-opt-param-scheduler to use the new value, or "
            "--use-checkpoint-opt-param-scheduler to keep the old one",
        )


def _filled_in(stored: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The flags of a checkpoint, with open ones derived by the rules of a launch.

    Megatron-LM stores None, or the default of its parser, for a flag that was not given and that it
    does not derive. An example is 1 group of queries without `--group-query-attention`. The result
    leaves out flags that the checkpoint does not hold.
    """
    known = _OPTIONS
    values: dict[str, Any] = {n: spec.default for n, spec in known.items()}
    told = {n for n in known if n in stored}
    told -= {n for n in told if stored[n] is None and known[n].required}
    if stored.get("data_args_path"):  # the paths stand in that file
        told -= {"data_path", "split"}
    now = config.flat()
    for name in known:
        if name not in told:
            values[name] = now[name]
        elif stored[name] is not None:
            values[name] = stored[name]
    draft = Draft(values=values, explicit=frozenset())
    fill_in(draft)
    return {name: draft[name] for name in told}


def _differs(name: str, now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    """Whether a flag says something else now than in the checkpoint, which may not tell it."""
    if name not in then:
        return False
    if name == "split" and not (now["data_path"] or then.get("data_path")):
        return False  # invented samples, and data sets that are divided already, know no shares
    if name == "use_distributed_optimizer" and now["optimizer"] != "adam":
        return False
    switch = _COUNTS_ONLY_WITH.get(name)
    if switch is not None and not (now[switch] or then.get(switch)):
        return False
    layers = now["num_layers"]
    return _meaning(name, now[name], layers) != _meaning(name, then[name], layers)


def _meaning(name: str, value: Any, num_layers: int) -> Any:
    """A value in the form in which values that mean the same are equal."""
    if name == "moe_layer_freq":
        with contextlib.suppress(ValueError):
            return layers_with_experts(str(value), num_layers)
    if name == "optimizer":
        return str(value).removeprefix("dist_")
    if name == "data_path":
        return list(value or [])
    if name == "split" and value is not None:
        with contextlib.suppress(ValueError, ZeroDivisionError, AssertionError):
            return parse_and_normalize_split(value)
    return value


def _check_groups(decoupled_lr: float | None, stored: Stored) -> None:
    """Refuses an optimizer with other parameter groups than the stored one.

    Raises:
        UsageError: naming the flag and the fix.
    """
    then = stored.arguments.get("decoupled_lr")
    if (decoupled_lr is None) != (then is None):
        raise UsageError(
            f"--decoupled-lr is {decoupled_lr} but checkpoint {stored.folder} was trained with "
            f"{then}: its optimizer knows other groups; give the flag as then, or start from the "
            "weights with --no-load-optim"
        )
