"""Finds the checkpoint to resume from, reads what it says about its run, and loads it under the
layout of this job.

If the latest checkpoint is damaged, half-written or missing, the newest complete one before it
takes its place. That can be forbidden, and does not happen with `--ckpt-step`. Nothing that a
checkpoint holds is run: see docs/security.md.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import merge, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factory_merges
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.dist_checkpointing.utils import (
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from megatron.core.dist_checkpointing.validation import (
    StrictHandling,
    determine_global_metadata,
    validate_integrity_and_strict_load,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.trainer.checkpoint import files
from megatron.trainer.checkpoint.group_values import as_parts, groups_in, kept_values
from megatron.trainer.checkpoint.safe_index import (
    METADATA,
    file_names,
    read_common,
    read_index,
    stray_file,
    unreadable,
)
from megatron.trainer.checkpoint.save import TORCH_ERRORS, model_state, sharding_metadata
from megatron.trainer.checkpoint.save_errors import root_cause
from megatron.trainer.common.collectives import (
    all_gather_object,
    broadcast_from_rank0,
    first_problem,
)
from megatron.trainer.common.errors import Refused, TrainingFailure
from megatron.trainer.common.program import other_command
from megatron.trainer.common.train_state import TrainState
from megatron.trainer.config import GROUPS, Config
from megatron.trainer.config.lengths import TrainingLengths
from megatron.trainer.model.gpt import Model
from megatron.trainer.model.norm_names import ask_by, other_names
from megatron.trainer.optim.optimizer import mark_decoupled

logger = logging.getLogger(__name__)

_NEW_IN_WEIGHTS = """layernorm_zero_centered_gamma quick_geglu multi_latent_attention q_lora_rank
    kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim mtp_num_layers num_experts
    moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
    moe_router_enable_expert_bias"""
NEW_IN_WEIGHTS = _NEW_IN_WEIGHTS.split()
"""Fields that the checkpoints of an older Megatron-LM lack: they count as their default there. They
change the weights."""
_NEW_IN_USE = """rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq
    rotary_scaling_factor mscale mscale_all_dim qk_l2_norm softmax_type glu_linear_offset
    activation_func_clamp_value mtp_loss_scaling_factor moe_router_topk moe_router_score_function
    moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups
    moe_router_group_topk moe_expert_capacity_factor"""
NEW_IN_USE = _NEW_IN_USE.split()
"""The same, for fields that change what is computed with the weights."""
NEW_RATES = ["decoupled_lr", "decoupled_min_lr"]
"""The same, for learning rates."""


Restore = Callable[[Config, Model, MegatronOptimizer, ProcessGroupCollection], None]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a checkpoint says about its run, read before anything is built."""

    folder: Path
    """Folder of the iteration."""
    iteration: int
    """Iteration of the checkpoint."""
    state: TrainState
    """Counters of the run."""
    lengths: TrainingLengths | None
    """Lengths of the run in samples; None in a checkpoint of another trainer."""
    arguments: dict[str, Any]
    """The resolved flags it was saved with; of those that its optimizer keeps, what that has."""
    metadata: dict[str, Any]
    """Format of the sharded tensors."""
    data: list[dict[str, Any]] | None = None
    """The data sets it was trained on, as `data_identity` describes them, or None."""
    skipped: tuple[str, ...] = ()
    """What is wrong with each newer checkpoint that it stands in for."""
    restore: Restore | None = None
    """Fills a job from elsewhere than files; None for a checkpoint."""


def iterations_to_try(
    load: Path, *, step: int | None, fallback: bool
) -> tuple[list[int], list[str]]:
    """The iterations to try to load from `--load`, best first; none if there never was one.

    Args:
        step: `--ckpt-step`, which nothing stands in for.
        fallback: whether an older one may stand in for the latest.

    Returns:
        The iterations, and what is wrong with the latest one if it cannot even be tried.

    Raises:
        TrainingFailure: no complete checkpoint may be taken; the message offers one.
    """
    if (load / files.CORE_MARK).is_file():
        folder = load.resolve()
        number = folder.name.removeprefix("iter_")
        step_flag = f" --ckpt-step {int(number)}" if number.isascii() and number.isdecimal() else ""
        raise TrainingFailure(
            f"--load {load} is the folder of one iteration; give --load {folder.parent}{step_flag}"
        )
    complete, wanted, problem = files.complete_iterations(load), step, None
    if step is None:
        try:
            wanted = files.read_latest(load)
        except (ValueError, OSError) as error:
            problem = str(error)
    if problem is None and wanted is None:
        if not complete and not files.was_ever_complete(load):
            return [], []
        problem = f"--load {load} has checkpoints but no {files.TRACKER}"
    elif wanted is not None and wanted not in complete:
        folder = files.folder_of(load, wanted)
        problem = f"checkpoint {folder} is {_what_is_wrong_with(folder)}"
    may_fall_back = fallback and step is None
    older = [i for i in complete if wanted is None or i < wanted][::-1] if may_fall_back else []
    if problem is None:
        assert wanted is not None
        return [wanted, *older], []
    if not older:
        raise TrainingFailure(f"{problem}; {_offer(load, complete)}")
    return older, [problem]


def _what_is_wrong_with(folder: Path) -> str:
    if files.is_legacy(folder):
        return (
            "of Megatron-LM's older format torch; save it there again with --ckpt-convert-format "
            "torch_dist --ckpt-convert-save FOLDER"
        )
    return files.unfinished(folder) or "missing"


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
        verify: compare checksums, not only sizes.
        fallback: take the newest intact one before the latest where that is damaged.
        trust_unverified: take one of COPUS whose manifest is gone or lists only a part.

    Returns:
        What is stored, or None when the directory never held a checkpoint.

    Raises:
        TrainingFailure: on every rank, when none may be taken, naming file and cause.
    """
    failure, tries, skipped = None, [], []
    if dist.get_rank() == 0:
        try:
            tries, skipped = iterations_to_try(load, step=step, fallback=fallback)
        except (TrainingFailure, OSError) as error:
            failure = str(error)
    failure, tries, skipped = broadcast_from_rank0((failure, tries, skipped))
    if failure:
        raise TrainingFailure(failure)
    for iteration in tries:
        folder = files.folder_of(load, iteration)
        problem = _problem_with(folder, verify=verify, trust_unverified=trust_unverified)
        if problem is None:
            stored, problem = _read_stored(folder, iteration, tuple(skipped))
            if stored is not None:
                return stored
        assert problem is not None
        skipped.append(problem)
    if not tries:
        return None
    rest = f", and so are all {len(skipped)} that are there" if len(skipped) > 1 else ""
    older = broadcast_from_rank0([i for i in files.complete_iterations(load) if i < min(tries)])
    offer = _offer(load, older) if older else f"--load {load} holds no other that is complete"
    raise TrainingFailure(f"checkpoint is damaged: {skipped[0]}{rest}; {offer}")


def _problem_with(folder: Path, *, verify: bool, trust_unverified: bool) -> str | None:
    """What is wrong with the files of a checkpoint, on every rank. Collective over the world."""
    try:
        found = files.damage(
            folder, rank=dist.get_rank(), world_size=dist.get_world_size(), contents=verify
        )
        if dist.get_rank() == 0 and not found:
            found = _doubt(folder, trust_unverified=trust_unverified)
    except (OSError, ValueError) as error:
        found = [f"{folder}: {error}" if isinstance(error, OSError) else str(error)]
    damage = [line for lines in all_gather_object(found) for line in lines]
    return damage[0] if damage else None


def _doubt(folder: Path, *, trust_unverified: bool) -> list[str]:
    """Why a checkpoint without known damage may still be damaged; logs it where it is trusted.

    Raises:
        Refused: index or common state cannot be read.
    """
    index = read_index(folder / METADATA)
    stray = stray_file(folder, index)
    if stray is not None:
        return [f"{stray} lies outside the checkpoint"]
    common = read_common(folder)
    doubt = files.unverified(folder, common, file_names(index))
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
        if may_be_shifted(common):
            logger.warning(
                "the optimizer of %s may be wrong: with several padded buckets Megatron-LM up to "
                "core_v0.19.0 stores it shifted (NVIDIA/Megatron-LM #5077). Compare it with the "
                "weights: %s %s --verify",
                folder,
                other_command("inspect_checkpoint.py"),
                folder,
            )
    return []


def may_be_shifted(common: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of Megatron-LM may hold a shifted optimizer: fully reshardable, from
    buffers of several buckets. No checkpoint says which version wrote it, nor how many buckets
    had padding.

    Args:
        common: what `common.pt` holds.
    """
    content = common.get("content_metadata") or {}
    args = vars(common.get("args") or argparse.Namespace())
    is_tied = not args.get("untie_embeddings_and_output_weights")
    # Tied rows have a bucket of their own; else buckets come with overlapping.
    several = args.get("overlap_grad_reduce") or (
        is_tied and (args.get("pipeline_model_parallel_size") or 1) > 1
    )
    kind = content.get("distrib_optim_sharding_type")
    return bool(kind == "fully_reshardable" and args.get("use_distributed_optimizer") and several)


def read_arguments(
    load: Path, *, step: int | None, fallback: bool = True, trust_unverified: bool = False
) -> dict[str, Any]:
    """The resolved flags a checkpoint was saved with, for `--use-checkpoint-args`. Needs no process
    group. Compares the sizes of all files, and the checksum of what holds the flags.

    Raises:
        TrainingFailure: there is no checkpoint, or it cannot be read.
    """
    tries, _ = iterations_to_try(load, step=step, fallback=fallback)
    problems = []
    for iteration in tries:
        folder = files.folder_of(load, iteration)
        try:
            found = files.damage(folder, contents=False)
            if not found:
                common = read_common(folder)
                doubt = None if trust_unverified else files.unverified(folder, common)
                if doubt is None:
                    return as_given(vars(common["args"]))
                found = [doubt]
            problems += found
        except Exception as error:  # whatever lies in place of the flags
            problems.append(str(unreadable(folder / files.COMMON, error)))
    if not problems:
        raise TrainingFailure(
            f"--use-checkpoint-args needs a checkpoint, and --load {load} has none"
        )
    raise TrainingFailure(problems[0])


def _read_stored(
    folder: Path, iteration: int, skipped: tuple[str, ...]
) -> tuple[Stored | None, str | None]:
    """What a checkpoint says, or why it cannot be read. Collective over the world."""
    stored, problem = None, None
    try:
        stored = stored_of(read_common(folder), folder, iteration, skipped)
    except Exception as error:  # whatever lies in place of a counter
        problem = str(unreadable(folder / files.COMMON, error))
    problem = first_problem(problem)
    return (stored if problem is None else None), problem


def as_given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Stored flags in the form of a command line, where Megatron-LM stores another one: a list for
    losses of the router even where there is one, and a text for the layers with experts."""
    found = dict(arguments)
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        if isinstance(found.get(name), (str, float, int)):
            found[name] = [found[name]]
    if isinstance(found.get("moe_layer_freq"), (list, tuple)):
        found["moe_layer_freq"] = str([*found["moe_layer_freq"]])
    elif found.get("moe_layer_freq") is not None:
        found["moe_layer_freq"] = str(found["moe_layer_freq"])
    return found


def stored_of(
    common: dict[str, Any],
    folder: Path,
    iteration: int,
    skipped: tuple[str, ...] = (),
    *,
    restore: Restore | None = None,
) -> Stored:
    """What the common state of a checkpoint says; see `Stored` for the arguments.

    Raises:
        Exception: of any kind, where it holds something else than it should.
    """
    new = {*NEW_IN_WEIGHTS, *NEW_IN_USE, *NEW_RATES}
    options = [f for group in GROUPS.values() for f in fields(group)]
    defaults = {f.name: f.default for f in options if f.name in new}
    arguments = {**defaults, **as_given(vars(common.get("args", argparse.Namespace())))}
    arguments |= kept_values(common)
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
        lengths=TrainingLengths.from_json(ours["horizon"]) if ours else None,
        arguments=arguments,
        metadata=metadata,
        data=data,
        skipped=skipped,
        restore=restore,
    )


def load_weights(
    stored: Stored,
    config: Config,
    model: Model,
    optimizer: MegatronOptimizer | None,
    groups: ProcessGroupCollection,
) -> None:
    """Loads weights and, unless there is none or asked not to, the optimizer. Collective over the
    world.

    Raises:
        TrainingFailure: on every rank, when keys do not match or a file cannot be read.
    """
    if stored.restore is not None:
        assert optimizer is not None
        stored.restore(config, model, optimizer, groups)
        return
    weights_only = config.checkpoint.no_load_optim or config.checkpoint.finetune
    with_optimizer = optimizer is not None and not weights_only
    kind = stored.metadata.get("distrib_optim_sharding_type")
    if with_optimizer and config.parallel.use_distributed_optimizer and kind != "fully_reshardable":
        raise TrainingFailure(
            f"the optimizer in {stored.folder} is stored as {kind}, which cannot change layout; "
            "save it with --dist-ckpt-optim-fully-reshardable, or start from the weights with "
            "--no-load-optim"
        )
    lacks = _no_optimizer(stored.folder) if with_optimizer and dist.get_rank() == 0 else None
    if problem := first_problem(lacks):
        raise TrainingFailure(f"checkpoint {stored.folder} does not load: {problem}")
    metadata = {**sharding_metadata(config, groups), **stored.metadata}
    sharded = {key: _tensors(chunk) for key, chunk in model_state(model, metadata).items()}
    if with_optimizer:
        assert optimizer is not None
        with _without_warnings("megatron.core.optimizer.distrib_optimizer"):
            sharded["optimizer"] = optimizer.sharded_state_dict(
                dict(sharded), is_loading=True, metadata=metadata
            )
    assert not any(isinstance(value, ShardedObject) for value in nested_values(sharded))
    strategy: Any = get_default_load_sharded_strategy(str(stored.folder))
    strategy = FullyParallelLoadStrategyWrapper(strategy, groups.dp_cp)
    problem: str | None = None
    loaded: Any = {}
    try:
        loaded, missing, unexpected = _load(sharded, stored.folder, strategy)
        problem = _mismatch(set(missing), set(unexpected), with_optimizer)
    except TORCH_ERRORS as error:
        logger.debug("loading failed", exc_info=True)
        problem = root_cause(error)
    if problem := first_problem(problem):
        raise TrainingFailure(f"checkpoint {stored.folder} does not load: {problem}")
    left: list[str] = []
    for i, chunk in enumerate(model.unwrapped):
        key = "model" if len(model.chunks) == 1 else f"model{i}"
        keys = chunk.load_state_dict(loaded[key], strict=False)
        left += [k for k in (*keys.missing_keys, *keys.unexpected_keys) if _matters(k)]
    if problem := first_problem(f"{left[0]} does not fit this model" if left else None):
        raise TrainingFailure(f"checkpoint {stored.folder} does not load: {problem}")
    if optimizer is None:
        return
    if with_optimizer:
        mark_decoupled(groups_in(loaded["optimizer"]))
        _put_back_empty_states(loaded["optimizer"])
        optimizer.load_state_dict(loaded["optimizer"])
    else:
        optimizer.reload_model_params()


def _load(
    sharded: dict[str, Any], folder: Path, strategy: Any
) -> tuple[dict[str, Any], set[str], set[str]]:
    """What `dist_checkpointing.load` with `strict="return_all"` does, with a common state that was
    read safely and may be that of another release. Collective over the world.

    Args:
        sharded: state with sharded tensors, to be filled.

    Returns:
        The state; keys of the checkpoint that were not asked for; keys that it lacks.
    """
    force_all_tensors_to_non_fp8(sharded)
    sharded, state, factories = load_preprocess(sharded)
    common = read_common(folder)
    if 0 in sharded.get("optimizer", ()):
        common["optimizer"] = as_parts(common["optimizer"], sharded["optimizer"])
    merge(common, state)
    sharded, _ = extract_sharded_base(sharded)
    stored: Any = strategy.load_sharded_metadata(folder)
    stored = {k: v for k, v in stored.items() if v.key != files.COMMON_STATE}
    ask_by(other_names({v.key for v in stored.values()}), sharded)
    sharded, missing, unexpected = validate_integrity_and_strict_load(
        sharded, StrictHandling.RETURN_ALL, True, *determine_global_metadata(sharded), stored
    )
    merge(common, strategy.load(sharded, folder))
    merged: Any = factories
    apply_factory_merges(common, merged)
    return common, missing, unexpected


def _put_back_empty_states(state: dict[Any, Any]) -> None:
    """Puts back the empty entries that megatron-core's loading drops, and its plain optimizers ask
    for. The optimizer for experts has no others on a stage of dense layers."""
    for part in [value for value in state.values() if isinstance(value, dict)]:
        _put_back_empty_states(part)
    if "param_groups" in state:
        state.setdefault("state", {})
    elif "optimizer" in state and "param_state_sharding_type" not in state:
        state.setdefault("fp32_from_fp16_params", [])


def _tensors(chunk: dict[str, Any]) -> dict[str, Any]:
    """What is asked for of a chunk: all but stored objects, which torch would unpickle whatever is
    in them. They hold the scales of 8-bit products, which every launch begins anew."""
    return {key: value for key, value in chunk.items() if not isinstance(value, ShardedObject)}


@contextlib.contextmanager
def _without_warnings(name: str) -> Iterator[None]:
    """Hides warnings of padding between buckets: what is read is cut by global places, and the
    empty tensors that it complains of are filled (docs/decisions/015)."""
    chatty = logging.getLogger(name)
    before = chatty.level
    chatty.setLevel(logging.ERROR)
    try:
        yield
    finally:
        chatty.setLevel(before)


def _no_optimizer(folder: Path) -> str | None:
    """Why there is no state of an optimizer to load, or None."""
    try:
        keys = read_index(folder / METADATA).state_dict_metadata
    except (Refused, OSError) as error:
        return str(error)
    if any("optimizer." in key for key in keys):
        return None
    return (
        "it holds no state of the optimizer; add --no-load-optim to go on with new moments, or "
        "--finetune to begin a run from its weights"
    )


def _mismatch(missing: set[str], unexpected: set[str], with_optimizer: bool) -> str | None:
    """Says which keys stand in the way.

    Args:
        missing: keys of the checkpoint that the model does not ask for.
        unexpected: keys that the model asks for and the checkpoint lacks.
    """
    unexpected, missing = set(filter(_matters, unexpected)), set(filter(_matters, missing))
    if not with_optimizer:
        missing = {k for k in missing if not k.startswith("optimizer.")}
    if unexpected:
        return f"it lacks {len(unexpected)} tensors of this model, the first is {min(unexpected)}"
    if missing:
        return f"it holds {len(missing)} tensors unknown to this model, the first is {min(missing)}"
    return None


def _matters(key: str) -> bool:
    """Whether a missing key is an error. Transformer Engine's extra state holds FP8 scales only,
    and what Megatron-LM saves for each rank is begun anew here."""
    return "_extra_state" not in key and key not in files.OF_RANKS
