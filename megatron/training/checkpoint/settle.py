"""Makes the flags of this launch and the checkpoint it continues into one configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron.training.checkpoint import resume
from megatron.training.checkpoint.resume import Stored
from megatron.training.common.errors import UsageError
from megatron.training.common.step_settings import StepSettings
from megatron.training.config import Config
from megatron.training.config.layout import batch_problems
from megatron.training.config.lengths import adopt
from megatron.training.config.vocabulary import pad_vocab_size, padding_unit


def settle(
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
        `config` with what the checkpoint decides: the horizons in samples and the padded
        vocabulary.

    Raises:
        UsageError: the flags contradict the checkpoint or the vocabulary.
    """
    if stored is not None and config.optim.use_checkpoint_opt_param_scheduler:
        config = config.replace(**resume.adopt_schedule_arguments(stored))
    rows = _padded_vocabulary(config, stored, vocab_size, tensor_parallel_sizes)
    config = config.replace(padded_vocab_size=rows)
    if stored is None:
        return config
    resume.check_same_run(config, stored)
    if stored.horizon is None or config.checkpoint.finetune:
        return config
    return adopt(config, stored.horizon, override=config.optim.override_opt_param_scheduler)


def _padded_vocabulary(
    config: Config, stored: Stored | None, vocab_size: int, tensor_parallel_sizes: Iterable[int]
) -> int:
    """Rows of the embedding: fixed by the checkpoint, else by the flags, the same for every layout
    that the run may take (docs/decisions/025).

    More rows would add tokens with logit 0 to every softmax and change the loss, so that a
    checkpoint's number stays.
    """
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    asked = model.padded_vocab_size if "padded_vocab_size" in config.explicit else None
    if stored is None or stored.arguments.get("padded_vocab_size") is None:
        unit = _unit(config, tensor_parallel_sizes)
        padded = asked or pad_vocab_size(vocab_size, unit)
        if padded < vocab_size:
            raise UsageError(
                f"--padded-vocab-size {padded} is less than the {vocab_size} tokens of the "
                "tokenizer; give at least that"
            )
        return padded
    padded = int(stored.arguments["padded_vocab_size"])
    if asked not in (None, padded):
        raise UsageError(
            f"--padded-vocab-size is {asked} but checkpoint {stored.folder} has {padded} rows; "
            "drop the flag, or change the rows with tools/convert_checkpoint.py --vocab"
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


def _unit(config: Config, tensor_parallel_sizes: Iterable[int] = ()) -> int:
    model = config.model
    return padding_unit(
        model.make_vocab_size_divisible_by,
        {config.parallel.tensor_model_parallel_size, *tensor_parallel_sizes},
        padded_for=model.pad_vocab_for_tensor_parallel_size,
    )


def vocabulary_line(config: Config, stored: Stored | None, *, vocab_size: int) -> str:
    """Says how many rows the embedding has, and why.

    Args:
        config: from `settle`.
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


def settle_settings(
    stored: StepSettings, config: Config, *, keep: bool
) -> tuple[StepSettings, list[str]]:
    """How a resumed run takes its steps.

    Args:
        stored: the settings of the checkpoint.
        config: of this launch; its layout may be another.
        keep: whether a controller goes on with them.

    Returns:
        Those settings as far as the layout can cut the batch, or none where nobody keeps them; and
        notes for the user.
    """
    plain = StepSettings()
    if stored == plain:
        return plain, []
    if not keep:
        note = (
            f"the checkpoint was trained with {stored}; without --copus-mode act flags count again"
        )
        return plain, [note]
    batch, micro = stored.global_batch_size, stored.micro_batch_size
    micro = micro or config.batch.micro_batch_size
    batch = batch or config.batch.initial_global_batch_size
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
