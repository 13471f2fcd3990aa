"""Finding and checking the checkpoint to go on from, and what it says about its run.

Where the latest checkpoint is damaged, half-written or missing, the newest complete one before it
takes its place, unless that is forbidden or one was asked for by number. Nothing that a checkpoint
holds is run: see docs/security.md.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.safe_globals import register_safe_globals

from megatron.training.checkpoint import files
from megatron.training.checkpoint.safe_index import METADATA, file_names, read_index, stray_file
from megatron.training.common.collectives import (
    all_gather_object,
    broadcast_from_rank0,
    first_problem,
)
from megatron.training.common.errors import TrainingFailure, UsageError
from megatron.training.common.train_state import TrainState
from megatron.training.config import GROUPS, Config
from megatron.training.config.derive import fill_in
from megatron.training.config.draft import Draft
from megatron.training.config.fields import option_specs
from megatron.training.config.lengths import TrainingLengths

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a checkpoint says about its run, read before anything is built."""

    folder: Path
    """Folder of the iteration."""
    iteration: int
    """Iteration of the checkpoint."""
    state: TrainState
    """Counters of the run."""
    horizon: TrainingLengths | None
    """Frozen horizons in samples; None in a checkpoint of another trainer."""
    arguments: dict[str, Any]
    """The resolved flags it was saved with."""
    metadata: dict[str, Any]
    """Format of the sharded tensors."""
    data: list[dict[str, Any]] | None = None
    """The data sets it was trained on, as `data_identity` describes them; None if it does not
    tell."""
    passed_over: tuple[str, ...] = ()
    """What is wrong with each newer checkpoint that it stands in for."""


def choices(load: Path, *, step: int | None, fallback: bool) -> tuple[list[int], list[str]]:
    """The iterations to try to load from `--load`, best first; none if there never was one.

    Args:
        load: `--load`.
        step: `--ckpt-step`, which nothing stands in for.
        fallback: whether an older one may stand in for the latest.

    Returns:
        The iterations, and what is wrong with the latest one if it cannot even be tried.

    Raises:
        TrainingFailure: no complete checkpoint may be taken; the message offers one.
    """
    complete, problem, older = files.complete_iterations(load), None, []
    try:
        wanted = step if step is not None else files.read_latest(load)
    except (ValueError, OSError) as error:
        wanted, problem, older = None, str(error), complete
    if problem is None and wanted is None:
        if not complete and not files.was_ever_complete(load):
            return [], []
        problem, older = f"--load {load} has checkpoints but no {files.TRACKER}", complete
    elif wanted is not None:
        older = [i for i in complete if i < wanted]
        if wanted not in complete:
            folder = files.folder_of(load, wanted)
            state = "half-written (no metadata.json)" if folder.exists() else "missing"
            if files.is_legacy(folder):
                state = (
                    "of Megatron-LM's older format torch; save it there again with "
                    "--ckpt-convert-format torch_dist --ckpt-convert-save FOLDER"
                )
            problem = f"checkpoint {folder} is {state}"
            complete = [i for i in complete if i != wanted]
    may_fall_back = fallback and step is None
    if problem is not None and not (older and may_fall_back):
        raise TrainingFailure(f"{problem}; {_offer(load, complete)}")
    first = [wanted] if problem is None and wanted is not None else []
    return first + (older[::-1] if may_fall_back else []), [problem] if problem else []


def _offer(load: Path, complete: list[int]) -> str:
    if not complete:
        return f"--load {load} holds no complete checkpoint"
    return f"load iteration {complete[-1]} instead with --ckpt-step {complete[-1]}"


def read_stored(
    load: Path,
    *,
    step: int | None,
    verify: bool,
    fallback: bool = False,
    trust_unverified: bool = False,
) -> Stored | None:
    """Finds a checkpoint, checks its bytes (each rank its share) and reads what it says. Collective
    over the world.

    Args:
        load: `--load`.
        step: `--ckpt-step`.
        verify: compare checksums, not only sizes.
        fallback: take the newest intact one before the latest where that is damaged.
        trust_unverified: take one of COPUS whose manifest is gone or lists only a part.

    Returns:
        What is stored, or None when the directory never held a checkpoint.

    Raises:
        TrainingFailure: on every rank, when none may be taken, naming file and cause.
    """
    failure, tries, passed = None, [], []
    if dist.get_rank() == 0:
        try:
            tries, passed = choices(load, step=step, fallback=fallback)
        except (TrainingFailure, OSError) as error:
            failure = str(error)
    failure, tries, passed = broadcast_from_rank0((failure, tries, passed))
    if failure:
        raise TrainingFailure(failure)
    for iteration in tries:
        folder = files.folder_of(load, iteration)
        problem = _problem_with(folder, verify=verify, trust_unverified=trust_unverified)
        if problem is None:
            stored = _read_common(folder, iteration, tuple(passed))
            if isinstance(stored, Stored):
                return stored
            problem = stored
        passed.append(problem)
    if not tries:
        return None
    rest = f", and so are all {len(passed)} that are there" if len(passed) > 1 else ""
    older = broadcast_from_rank0([i for i in files.complete_iterations(load) if i < min(tries)])
    offer = _offer(load, older) if older else f"--load {load} holds no other that is complete"
    raise TrainingFailure(f"checkpoint is damaged: {passed[0]}{rest}; {offer}")


def _problem_with(folder: Path, *, verify: bool, trust_unverified: bool) -> str | None:
    """What is wrong with the files of a checkpoint, on every rank. Collective over the world."""
    try:
        found = files.damage(
            folder, rank=dist.get_rank(), world_size=dist.get_world_size(), contents=verify
        )
        if dist.get_rank() == 0 and not found:
            found = _doubts(folder, trust_unverified=trust_unverified)
    except (OSError, ValueError) as error:
        found = [f"{folder}: {error}" if isinstance(error, OSError) else str(error)]
    damage = [line for lines in all_gather_object(found) for line in lines]
    return damage[0] if damage else None


def _doubts(folder: Path, *, trust_unverified: bool) -> list[str]:
    """What speaks against files in which no damage was found. Says so where there is nothing that
    could have shown any.

    Raises:
        ValueError: index or common state cannot be read.
    """
    index = read_index(folder / METADATA)
    stray = stray_file(folder, index)
    if stray is not None:
        return [f"{stray} lies outside the checkpoint"]
    doubt = files.unverified(folder, _load_common(folder), file_names(index))
    if doubt is not None and not trust_unverified:
        return [doubt]
    if doubt is not None:
        logger.warning("checkpoint is loaded unverified: %s", doubt)
    elif files.read_manifest(folder) is None:
        logger.warning(
            "checkpoint is loaded unverified: %s is of Megatron-LM, which writes no %s",
            folder,
            files.MANIFEST,
        )
    return []


def read_arguments(
    load: Path, *, step: int | None, fallback: bool = True, trust_unverified: bool = False
) -> dict[str, Any]:
    """The resolved flags a checkpoint was saved with, for `--use-checkpoint-args`. Needs no process
    group. Compares the sizes of all files, and the checksum of the one that holds the flags.

    Args:
        load: `--load`.
        step: `--ckpt-step`.
        fallback: `--ckpt-fallback`.
        trust_unverified: `--ckpt-trust-unverified`.

    Raises:
        TrainingFailure: there is no checkpoint, or it cannot be read.
    """
    tries, _ = choices(load, step=step, fallback=fallback)
    problems = []
    for iteration in tries:
        folder = files.folder_of(load, iteration)
        try:
            damage = files.damage(folder, contents=False)
            if not damage:
                common = _load_common(folder)
                doubt = None if trust_unverified else files.unverified(folder, common)
                if doubt is None:
                    return vars(common["args"])
                damage = [doubt]
            problems += damage
        except _Unreadable as error:
            problems.append(str(error))
        except Exception as error:  # whatever lies in place of the flags
            problems.append(str(_Unreadable(folder, error)))
    if not problems:
        raise TrainingFailure(
            f"--use-checkpoint-args needs a checkpoint, and --load {load} has none"
        )
    raise TrainingFailure(problems[0])


class _Unreadable(ValueError):
    """The common state of a checkpoint cannot be read."""

    def __init__(self, folder: Path, error: Exception) -> None:
        """Says so in one line.

        Args:
            folder: of the iteration.
            error: what torch, or the reading of what it found, raised.
        """
        text = " ".join(str(error).split())[:300]
        super().__init__(f"{folder / files.COMMON} cannot be read: {type(error).__name__}: {text}")


def _load_common(folder: Path) -> dict[str, Any]:
    """The common state of a checkpoint.

    Raises:
        _Unreadable: torch cannot read it, or it is no dictionary.
    """
    register_safe_globals()
    try:
        common = torch.load(folder / files.COMMON, map_location="cpu", weights_only=True)
        if not isinstance(common, dict):
            raise TypeError(f"it holds a {type(common).__name__} instead of a dictionary")
    except Exception as error:  # torch and pickle raise many kinds; all mean an unreadable file
        raise _Unreadable(folder, error) from error
    return common


def _read_common(folder: Path, iteration: int, passed_over: tuple[str, ...]) -> Stored | str:
    """What a checkpoint says, or why it cannot be read. Collective over the world."""
    problem, stored = None, None
    try:
        stored = _stored(_load_common(folder), folder, iteration, passed_over)
    except _Unreadable as error:
        problem = str(error)
    except Exception as error:  # whatever lies in place of a counter
        problem = str(_Unreadable(folder, error))
    if problem := first_problem(problem):
        return problem
    assert stored is not None
    return stored


def _stored(
    common: dict[str, Any], folder: Path, iteration: int, passed_over: tuple[str, ...]
) -> Stored:
    arguments = {**_defaults(), **vars(common.get("args", argparse.Namespace()))}
    ours = common.get(files.OUR_KEY)
    if ours:
        state = TrainState.from_json(ours["train_state"])
    else:
        consumed = int(arguments.get("consumed_train_samples") or 0)
        state = TrainState(
            iteration=int(common.get("iteration", iteration)),
            consumed_samples=consumed,
            lr_samples=consumed,
            skipped_samples=int(arguments.get("skipped_train_samples") or 0),
        )
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    data = ours.get("data") if ours else None
    if data is not None and not all(isinstance(entry, dict) for entry in data):
        raise ValueError("it does not describe its data sets")
    return Stored(
        folder=folder,
        iteration=iteration,
        state=state,
        horizon=TrainingLengths.from_json(ours["horizon"]) if ours else None,
        arguments=arguments,
        metadata=metadata,
        data=data,
        passed_over=passed_over,
    )


def _defaults() -> dict[str, Any]:
    """What a checkpoint that does not tell a later flag was trained with."""
    later = (*_LATER_IN_WEIGHTS, *_LATER_IN_USE, *_LATER_RATES)
    return {
        f.name: f.default for group in GROUPS.values() for f in fields(group) if f.name in later
    }


# Fields that older checkpoints do not tell, which then had their default. The first change what the
# stored weights are, the second what is computed with them.
_LATER_IN_WEIGHTS = {
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "quick_geglu": "--quick-geglu",
    "multi_latent_attention": "--multi-latent-attention",
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_head_dim": "--qk-head-dim",
    "qk_pos_emb_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "mtp_num_layers": "--mtp-num-layers",
}
_LATER_IN_USE = {
    "rotary_interleaved": "--rotary-interleaved",
    "rotary_seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
    "no_rope_freq": "--no-rope-freq",
    "rotary_scaling_factor": "--rotary-scaling-factor",
    "mscale": "--mscale",
    "mscale_all_dim": "--mscale-all-dim",
    "qk_l2_norm": "--qk-l2-norm",
    "softmax_type": "--softmax-type",
    "glu_linear_offset": "--glu-linear-offset",
    "activation_func_clamp_value": "--activation-func-clamp-value",
    "mtp_loss_scaling_factor": "--mtp-loss-scaling-factor",
}
_LATER_RATES = {"decoupled_lr": "--decoupled-lr", "decoupled_min_lr": "--decoupled-min-lr"}
# Fields that change nothing while the flag behind them is off in both.
_COUNTS_ONLY_WITH = {
    "q_lora_rank": "multi_latent_attention",
    "kv_lora_rank": "multi_latent_attention",
    "qk_head_dim": "multi_latent_attention",
    "qk_pos_emb_head_dim": "multi_latent_attention",
    "v_head_dim": "multi_latent_attention",
    "rotary_scaling_factor": "multi_latent_attention",
    "mscale": "multi_latent_attention",
    "mscale_all_dim": "multi_latent_attention",
    "mtp_loss_scaling_factor": "mtp_num_layers",
    "rope_scaling_factor": "use_rope_scaling",
}
# Fields in which a resumed run must agree with its checkpoint, with the flag that sets each.
_MUST_MATCH = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_query_groups": "--num-query-groups",
    "kv_channels": "--kv-channels",
    "position_embedding_type": "--position-embedding-type",
    "normalization": "--normalization",
    "swiglu": "--swiglu",
    "add_bias_linear": "--disable-bias-linear",
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "max_position_embeddings": "--max-position-embeddings",
    **_LATER_IN_WEIGHTS,
}
_MUST_MATCH_TO_CONTINUE = {
    "seq_length": "--seq-length",
    "seed": "--seed",
    "data_path": "--data-path",
    "split": "--split",
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "use_rope_scaling": "--use-rope-scaling",
    "rope_scaling_factor": "--rope-scaling-factor",
    "layernorm_epsilon": "--norm-epsilon",
    "squared_relu": "--squared-relu",
    **_LATER_IN_USE,
}
_MUST_MATCH_WITHOUT_OVERRIDE = {
    "lr": "--lr",
    "min_lr": "--min-lr",
    "lr_decay_style": "--lr-decay-style",
    "start_weight_decay": "--start-weight-decay",
    "end_weight_decay": "--end-weight-decay",
    **_LATER_RATES,
}


def check_same_run(config: Config, stored: Stored) -> None:
    """Refuses flags that would make the checkpoint another model, or the continuation another run.

    Raises:
        UsageError: naming the flag, both values and the fix.
    """
    now, then = config.flat(), _filled_in(stored.arguments, config)
    required = dict(_MUST_MATCH)
    if not config.checkpoint.finetune:
        required |= _MUST_MATCH_TO_CONTINUE
    for name, flag in required.items():
        if _differs(name, now, then):
            raise UsageError(
                f"{flag} is {now[name]!r} but checkpoint {stored.folder} was trained with "
                f"{then[name]!r}; give the same value"
                + ("" if name in _MUST_MATCH else ", or --finetune to start another run from it")
            )
    if not (config.checkpoint.finetune or config.checkpoint.no_load_optim):
        _check_groups(now["decoupled_lr"], stored)
    if config.checkpoint.finetune or config.optim.override_opt_param_scheduler:
        return
    for name, flag in _MUST_MATCH_WITHOUT_OVERRIDE.items():
        if _differs(name, now, then):
            raise UsageError(
                f"{flag} is {now[name]!r} but checkpoint {stored.folder} was trained with "
                f"{then[name]!r}; give --override-opt-param-scheduler to use the new "
                "value, or --use-checkpoint-opt-param-scheduler to keep the old one"
            )


def _filled_in(stored: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The flags of a checkpoint as this trainer's own would come out: what was left open is derived
    by the rules of a launch.

    Megatron-LM stores None, or the default of its parser, for a flag that was not given and where
    it derives nothing; 1 group of queries without `--group-query-attention`, for example. What a
    checkpoint does not tell at all is left out.
    """
    known = {spec.dest: spec for group in GROUPS.values() for spec in option_specs(group)}
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
    switch = _COUNTS_ONLY_WITH.get(name)
    if switch is not None and not (now[switch] or then.get(switch)):
        return False
    return _meaning(name, now[name]) != _meaning(name, then[name])


def _meaning(name: str, value: Any) -> Any:
    """A value in the form in which values that mean the same are equal."""
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


def adopt_schedule_arguments(stored: Stored) -> dict[str, Any]:
    """The learning-rate settings as stored, for `--use-checkpoint-opt-param-scheduler`."""
    names = _MUST_MATCH_WITHOUT_OVERRIDE
    return {n: value for n in names if (value := stored.arguments.get(n)) is not None}
