"""Generates text from a checkpoint of any layout, on one process, with megatron-core's inference
classes.

`GPTInferenceWrapper` runs the model with a cache of keys and values in a `StaticInferenceContext`,
and `TextGenerationController` picks the tokens. They run on a CPU inside `device.use_device`. The
engines above the controller are left out: `DynamicInferenceEngine` needs CUDA graphs and
flash-attention, and `StaticInferenceEngine` adds a queue and a progress bar to one call of the
controller, and is deprecated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.inference_request import InferenceRequest, Status
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.trainer.checkpoint.formats import format_of, model_formats
from megatron.trainer.checkpoint.load import Stored, load_weights, read_stored
from megatron.trainer.checkpoint.resume import merge_resume_config
from megatron.trainer.common import optional
from megatron.trainer.common.core_version import since
from megatron.trainer.common.device import use_device
from megatron.trainer.common.errors import TrainingFailure, UsageError
from megatron.trainer.common.gpus import check_torch_build
from megatron.trainer.common.program import other_command
from megatron.trainer.config import Config
from megatron.trainer.config.arguments import parse_args, resolve, with_checkpoint_args
from megatron.trainer.data.tokenizer import Tokenizer, build_tokenizer, require_eod
from megatron.trainer.distributed.process_groups import destroy_groups
from megatron.trainer.model.gpt import Model, build_for_inference, parameter_dtype
from megatron.trainer.train.build import groups_of
from megatron.trainer.train.pretrain import tokenizer_flags

GREEDY = 1
"""The `top_k` that takes the most likely token."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What the model wrote after one prompt."""

    prompt: str
    """The text it went on from."""
    generated_text: str
    """The text it added."""
    generated_tokens: list[int]
    """The tokens it added, without that of the end of the document."""
    finish_reason: str
    """`eod`: the model ended the document. `length`: it wrote as many tokens as were asked for.
    `context`: no position was left."""


class TextGenerator:
    """A model with its tokenizer, ready to write. `open_generator` makes one.

    Args:
        tokenizer: that the model was trained with.
        stored: the checkpoint that the weights are from.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        groups: ProcessGroupCollection,
        tokenizer: Tokenizer,
        stored: Stored,
    ) -> None:
        require_eod(tokenizer, "text generation")
        self.tokenizer, self.stored = tokenizer, stored
        # megatron-core stops at one token only.
        self._ends = _end_tokens(stored.folder, stored.arguments)
        self.max_length = config.model.max_position_embeddings
        """Tokens of a prompt and what follows it, at most."""
        (chunk,) = model.chunks
        self._groups = groups
        context = self._context(max_sequence_length=0)
        others: tuple[Any, ...] = (context,)
        if not since("0.17"):
            others = (_wrapper_settings(config, self.max_length), context, groups)
        self._wrapper = _WithoutPadding(chunk, *others, vocab_size=tokenizer.vocab_size)
        of_stages: tuple[Any, ...] = () if since("0.17") else (groups.pp,)
        self._controller = TextGenerationController(self._wrapper, tokenizer, *of_stages)

    def _context(self, *, max_sequence_length: int) -> StaticInferenceContext:
        context: Any = StaticInferenceContext(
            max_batch_size=1, max_sequence_length=max_sequence_length
        )
        if since("0.17"):
            context.config.pg_collection = self._groups
        return context

    def tokens_of(self, prompt: str, what: str) -> list[int]:
        """The tokens of a prompt.

        Args:
            what: its name in an error, such as `--prompt`.

        Raises:
            UsageError: there is nothing to go on from, or no position left to write to.
        """
        if not prompt:
            raise UsageError(f"{what} is empty; give some text to go on from")
        try:
            prompt.encode()
            tokens = self.tokenizer.tokenize(prompt)
            # A template that ends each text would end the document before it goes on.
            if after := self.tokenizer.around.after:
                tokens = tokens[: -len(after)]
        except ValueError as error:
            raise UsageError(f"{what} {prompt[:40]!r} cannot become tokens: {error}") from error
        if not tokens:
            raise UsageError(f"{what} {prompt[:40]!r} has no token; give some text to go on from")
        if not 0 <= min(tokens) <= max(tokens) < self.tokenizer.vocab_size:
            raise UsageError(
                f"{what} {prompt[:40]!r} has a token outside the vocabulary of "
                f"{self.tokenizer.vocab_size}; leave it out"
            )
        if len(tokens) >= self.max_length:
            raise UsageError(
                f"{what} has {len(tokens)} tokens, and the model has {self.max_length} positions "
                f"(--max-position-embeddings) for it and what follows; give at most "
                f"{self.max_length - 1}"
            )
        return tokens

    def generate(self, prompt: str, params: SamplingParams, seed: int) -> Generated:
        """Continues one prompt to the end of the document, or for as many tokens as asked for.

        Args:
            prompt: that `tokens_of` accepts.
            params: that `check_sampling` accepts.
            seed: of the draws; the same seed gives the same text, whatever was written before.
        """
        tokens = self.tokens_of(prompt, "the prompt")
        asked, left = params.num_tokens_to_generate, self.max_length - len(tokens)
        # All of the vocabulary is no filter, and megatron-core wants fewer for one.
        top_k = 0 if params.top_k == self.tokenizer.vocab_size else params.top_k
        params = dataclasses.replace(params, num_tokens_to_generate=min(asked, left), top_k=top_k)
        request = InferenceRequest(
            request_id=0,
            prompt=prompt,
            prompt_tokens=tokens,
            sampling_params=params,
            status=Status.ACTIVE_BUT_NOT_GENERATING_TOKENS,
        )
        # A cache as long as this text: one for all positions of a model may not fit.
        self._wrapper.inference_context = self._context(
            max_sequence_length=len(tokens) + params.num_tokens_to_generate
        )
        self._controller.sampling_rng.manual_seed(seed)
        self._controller.generate_all_output_tokens_static_batch(OrderedDict({0: request}))
        assert request.generated_tokens is not None
        new = request.generated_tokens.tolist()
        new = list(itertools.takewhile(lambda token: token not in self._ends, new))
        ends = "length" if asked <= left else "context"
        return Generated(
            prompt=prompt,
            generated_text=self._text_after(tokens, new),
            generated_tokens=new,
            finish_reason="eod" if len(new) < min(asked, left) else ends,
        )

    def _text_after(self, tokens: list[int], new: list[int]) -> str:
        """The text of new tokens as it stands after others: some tokenizers write a word that
        begins a text in another way."""
        before, whole = (self.tokenizer.detokenize(ids) for ids in (tokens, tokens + new))
        if whole.startswith(before):
            return whole[len(before) :]
        return self.tokenizer.detokenize(new)


def _wrapper_settings(config: Config, max_length: int) -> Any:
    """What the wrapper of megatron-core 0.16 wants beside the context."""
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
        InferenceWrapperConfig,
    )

    return InferenceWrapperConfig(
        hidden_size=config.model.hidden_size,
        params_dtype=parameter_dtype(config),
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=config.model.padded_vocab_size,
        inference_max_requests=1,
        inference_max_seq_length=max_length,
    )


class _WithoutPadding(GPTInferenceWrapper):
    """Never lets a row be taken that only fills up the vocabulary: no tokenizer knows it."""

    def __init__(self, *others: Any, vocab_size: int) -> None:
        super().__init__(*others)
        self._vocab_size = vocab_size

    def _forward(self, inference_input: dict[str, Any]) -> torch.Tensor:
        logits = super()._forward(inference_input)
        logits[..., self._vocab_size :] = float("-inf")
        return logits


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuses sampling parameters that make no sense.

    Args:
        params: `top_k` 0 and `top_p` 0 filter nothing; `top_k` 1 is greedy.
        vocab_size: tokens of the tokenizer.

    Raises:
        UsageError: naming the flag and the fix.
    """
    if params.num_tokens_to_generate < 1:
        raise UsageError(
            f"--num-tokens-to-generate {params.num_tokens_to_generate} must be at least 1"
        )
    if not 0 < params.temperature < float("inf"):
        raise UsageError(f"--temperature {params.temperature:g} must be above 0 and finite")
    if not 0 <= params.top_k <= vocab_size:
        raise UsageError(
            f"--top-k {params.top_k} must be from 0, which keeps all, to {vocab_size}, the tokens "
            "of the vocabulary"
        )
    if not 0 <= params.top_p <= 1:
        raise UsageError(f"--top-p {params.top_p:g} must be from 0, which keeps all, to 1")
    if params.top_k and params.top_p:
        raise UsageError("--top-k and --top-p exclude each other; drop one")


@dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """The model of a checkpoint on this process."""

    config: Config
    """Of the model, on one process."""
    model: Model
    """With its weights."""
    groups: ProcessGroupCollection
    tokenizer: Tokenizer
    """That the model was trained with."""
    stored: Stored
    """The checkpoint that the weights are from."""
    device: torch.device
    """Where the weights are."""


@contextlib.contextmanager
def open_generator(
    load: Path,
    *,
    step: int | None = None,
    device: str = "auto",
    flags: Sequence[str] = (),
    trust_unverified: bool = False,
) -> Iterator[TextGenerator]:
    """Builds the model of a checkpoint on this process, with its weights and its tokenizer; see
    `open_model`."""
    with open_model(
        load, step=step, device=device, flags=flags, trust_unverified=trust_unverified
    ) as opened:
        yield TextGenerator(
            opened.config, opened.model, opened.groups, opened.tokenizer, opened.stored
        )


@contextlib.contextmanager
def open_model(
    load: Path,
    *,
    step: int | None = None,
    device: str = "auto",
    flags: Sequence[str] = (),
    trust_unverified: bool = False,
) -> Iterator[OpenedModel]:
    """Builds the model of a checkpoint on this process, with its weights and its tokenizer.

    Args:
        load: a `--save` directory; the checkpoint may be of any layout.
        step: iteration; None takes the latest that is complete and undamaged.
        device: `cpu`, `cuda`, or `auto`: a GPU if there is one.
        flags: of the trainer; these win over those that the checkpoint was saved with.

    Raises:
        UsageError: there is no checkpoint, its flags or these do not fit, or torch cannot use the
            GPU.
        TrainingFailure: it is damaged or does not load.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("a checkpoint is opened on one process; start it without torchrun or srun")
    if not load.is_dir():
        raise UsageError(f"--load {load} is not a directory; give the --save directory of a run")
    check_torch_build(device)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU, and there is none; use --device cpu")
    with use_device(device) as opened:
        dist.init_process_group(opened.backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            stored = read_stored(
                load, step=step, verify=True, fallback=True, trust_unverified=trust_unverified
            )
            if stored is None:
                fix = "give the --save directory of a run"
                if format_of(load) is not None:
                    fix = f"make one with {other_command('convert_checkpoint.py')}"
                raise UsageError(f"--load {load} holds no checkpoint; {fix}")
            config = _config_of(stored, [*flags, "--device", device])
            tokenizer = build_tokenizer(**tokenizer_flags(config))
            config = merge_resume_config(config, stored, vocab_size=tokenizer.vocab_size)
            groups = groups_of(config)
            model = build_for_inference(config, groups, opened)
            load_weights(stored, config, model, None, groups)
            _leave_out_further_tokens(model)
            yield OpenedModel(
                config=config,
                model=model,
                groups=groups,
                tokenizer=tokenizer,
                stored=stored,
                device=opened.torch_device,
            )
        finally:
            destroy_groups()
            dist.destroy_process_group()


def _leave_out_further_tokens(model: Model) -> None:
    """Turns off the layers of `--mtp-num-layers`, which only help training: megatron-core wants
    labels for them. They were built to be loaded."""
    for chunk in model.unwrapped:
        chunk.mtp_process = False
        chunk.config.mtp_num_layers = None


def _config_of(stored: Stored, flags: Sequence[str]) -> Config:
    """The configuration of a checkpoint's model for one process.

    Raises:
        UsageError: the flags do not fit.
        TrainingFailure: the checkpoint does not say what its model is.
    """
    length = stored.arguments.get("max_position_embeddings")
    if length is None:
        raise TrainingFailure(
            f"checkpoint {stored.folder} does not hold the flags that it was trained with, so that "
            "its model cannot be built; continue the run once, which writes them"
        )
    precision = [f"--{name}" for name in ("bf16", "fp16") if stored.arguments.get(name)]
    # What flex needs, one rank does not have. All dispatchers give the same numbers.
    is_flex = stored.arguments.get("moe_token_dispatcher_type") == "flex"
    dispatcher = ["--moe-token-dispatcher-type", "alltoall"] if is_flex else []
    own = [
        *dispatcher,
        *flags,
        *precision,
        "--seq-length",
        str(length),
        "--finetune",
        "--mock-data",
    ]
    own += ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "0"]
    args = with_checkpoint_args(parse_args(own), stored.arguments)
    return resolve(args, 1, **optional.abilities())


def _end_tokens(checkpoint: Path, arguments: Mapping[str, Any]) -> frozenset[int]:
    """The tokens of all formats that end a text; see `ModelFormat.end_tokens`."""
    formats = model_formats().values()
    return frozenset().union(*(one.end_tokens(checkpoint, arguments) for one in formats))
