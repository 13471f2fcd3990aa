"""A GPT decoder behind branches: encoders that read inputs of their own, one beside the other.

A branch reads patches (rows of numbers, such as the pixels of a part of an image) or tokens, and
runs layers of megatron-core without a causal mask. The decoder reads the outputs of all branches,
joined along the sequence, and behind them its own text, for whose tokens it has the usual loss.

The model is cut into nodes, which a `StageGraph` lays out over ranks. Weights depend on the seed
and on the name of a node, never on where it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.trainer.config import Config
from megatron.trainer.distributed.process_groups import random_seed_at, seed_build
from megatron.trainer.model.attention import SdpaAttention
from megatron.trainer.model.chunked_logits import ChunkedLogitsGPT
from megatron.trainer.model.gpt import core_config, layer_spec
from megatron.trainer.model.init import InitialWeights
from megatron.trainer.model.norm import Norm

Batch = dict[str, torch.Tensor]
DECODER = "decoder"
_LARGEST = 1 << 31


def _check_sizes(shape: Any, *names: str) -> None:
    """Refuses sizes that are none, as a file may hold them.

    Raises:
        ValueError: names the field.
    """
    for name in names:
        value = getattr(shape, name)
        if type(value) is not int or not 1 <= value < _LARGEST:
            raise ValueError(f"{name} must be a whole number of at least 1")


@dataclass(frozen=True, kw_only=True)
class Branch:
    name: str
    """Of the branch, and of its input in a batch."""
    num_layers: int
    seq_length: int
    """Patches or tokens of a sample."""
    reads: str = "patches"
    """`patches` or `tokens`."""
    nodes: int = 1
    """Parts that stages may lie between; it divides the layers."""
    merged: int = 1
    """Neighbouring outputs that become one before the decoder; it divides the sequence."""

    def __post_init__(self) -> None:
        _check_sizes(self, "num_layers", "seq_length", "nodes", "merged")
        if self.reads not in ("patches", "tokens"):
            raise ValueError(f"branch {self.name} reads {self.reads}; use patches or tokens")
        if self.num_layers % self.nodes:
            raise ValueError(
                f"branch {self.name}: {self.nodes} nodes do not divide {self.num_layers} layers"
            )
        if self.seq_length % self.merged:
            raise ValueError(
                f"branch {self.name}: {self.merged} merged outputs do not divide "
                f"{self.seq_length} of a sample"
            )


@dataclass(frozen=True, kw_only=True)
class BranchedShape:
    """Branches, and the decoder behind them.

    Raises:
        ValueError: sizes that do not divide, or names that are there twice.
    """

    branches: tuple[Branch, ...]
    """In the order in which the decoder reads them."""
    decoder_layers: int
    seq_length: int
    """Tokens of the text of a sample."""
    decoder_nodes: int = 1
    """Parts of the decoder that stages may lie between."""
    patch_size: int = 64
    """Numbers of a patch."""

    def __post_init__(self) -> None:
        _check_sizes(self, "decoder_layers", "seq_length", "decoder_nodes", "patch_size")
        names = [branch.name for branch in self.branches]
        if not names or len({*names, DECODER}) <= len(names):
            raise ValueError(f"branches {names} need names of their own, none of them {DECODER}")
        if self.decoder_layers % self.decoder_nodes:
            raise ValueError(
                f"{self.decoder_nodes} nodes do not divide {self.decoder_layers} decoder layers"
            )

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, each behind those that it needs; `image.0` is the first of a branch
        of several."""
        parts = [(branch.name, branch.nodes) for branch in self.branches]
        parts.append((DECODER, self.decoder_nodes))
        return tuple(f"{n}.{i}" if count > 1 else n for n, count in parts for i in range(count))

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Node that makes an output, and one that takes it."""
        found, at = [], 0
        ends = []
        for branch in self.branches:
            found += [(n, n + 1) for n in range(at, at + branch.nodes - 1)]
            at += branch.nodes
            ends.append(at - 1)
        found += [(n, at) for n in ends]
        found += [(n, n + 1) for n in range(at, at + self.decoder_nodes - 1)]
        return tuple(sorted(found))

    @property
    def joined_length(self) -> int:
        """Rows of a sample that the decoder reads."""
        return self.seq_length + sum(b.seq_length // b.merged for b in self.branches)

    def output_lengths(self) -> list[int]:
        """Rows of a sample in the output of every node."""
        found = []
        for b in self.branches:
            found += [b.seq_length] * (b.nodes - 1) + [b.seq_length // b.merged]
        return found + [self.joined_length] * self.decoder_nodes

    def stage_of(self, stages: Sequence[Sequence[str]]) -> tuple[int, ...]:
        """The stage of every node.

        Args:
            stages: names of the nodes of every stage, as `copus plan-graph` gives them.

        Raises:
            ValueError: a node that is on no stage or on two, or that this model does not have.
        """
        where = {node: r for r, nodes in enumerate(stages) for node in nodes}
        if sorted(n for nodes in stages for n in nodes) != sorted(self.nodes):
            raise ValueError(f"the stages must hold each of {', '.join(self.nodes)} once")
        return tuple(where[node] for node in self.nodes)


class FullAttention(SdpaAttention):
    """Attention to all positions, before and behind."""

    def __init__(self, *args: Any, attn_mask_type: AttnMaskType, **more: Any) -> None:
        assert attn_mask_type == AttnMaskType.no_mask, attn_mask_type
        super().__init__(*args, attn_mask_type=AttnMaskType.causal, **more)


class BranchPart(torch.nn.Module):
    """A node of a branch.

    Args:
        branch: which one.
        part: place of this node in the branch.
    """

    def __init__(
        self,
        shape: BranchedShape,
        branch: Branch,
        part: int,
        config: Config,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__()
        core, width = _core(config, branch.num_layers // branch.nodes), config.model.hidden_size
        self.branch, self.is_first, self.is_last = branch, part == 0, part == branch.nodes - 1
        if self.is_first and branch.reads == "tokens":
            self.embedding = LanguageModelEmbedding(
                core,
                vocab_size=config.model.padded_vocab_size,
                max_sequence_length=branch.seq_length,
                position_embedding_type="learned_absolute",
                tp_group=groups.tp,
            )
        elif self.is_first:
            self.patches = torch.nn.Linear(shape.patch_size, width, bias=False)
            self.position_embeddings = torch.nn.Embedding(branch.seq_length, width)
        self.block = TransformerBlock(
            core,
            _block_of(_full(config), core.num_layers),
            post_layer_norm=self.is_last,
            post_process=self.is_last,
            pg_collection=groups,
        )
        if self.is_last:
            self.projection = torch.nn.Linear(branch.merged * width, width, bias=False)

    def forward(self, batch: Batch, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Runs the layers of this node.

        Args:
            batch: its input under the name of the branch: [micro batch, seq, patch] or tokens
                [micro batch, seq]; read by the first node only.
            inputs: [seq, micro batch, hidden] the output of the node before; none for the first.

        Returns:
            [seq or merged seq, micro batch, hidden].
        """
        if not self.is_first:
            hidden = inputs[0]
        elif self.branch.reads == "tokens":
            tokens = batch[self.branch.name]
            hidden = self.embedding(tokens, _positions(tokens))
        else:
            rows = self.patches(batch[self.branch.name]).transpose(0, 1)
            hidden = rows + self.position_embeddings.weight[:, None]
        hidden = self.block(hidden, attention_mask=None)
        if not self.is_last:
            return hidden
        seq, size, width = hidden.shape
        merged = self.branch.merged
        rows = hidden.view(seq // merged, merged, size, width).transpose(1, 2)
        return self.projection(rows.reshape(seq // merged, size, merged * width))


class DecoderPart(torch.nn.Module):
    """A node of the decoder.

    Args:
        part: place of this node in the decoder.
    """

    def __init__(
        self, shape: BranchedShape, part: int, config: Config, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.is_first, self.is_last = part == 0, part == shape.decoder_nodes - 1
        core = _core(config, shape.decoder_layers // shape.decoder_nodes)
        spec = _block_of(layer_spec(config), core.num_layers)
        self.gpt = _TextLossGPT(
            core,
            spec,
            vocab_size=config.model.padded_vocab_size,
            max_sequence_length=shape.joined_length,
            pre_process=self.is_first,
            post_process=self.is_last,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            pg_collection=groups,
        )

    def forward(self, batch: Batch, inputs: list[torch.Tensor]) -> torch.Tensor:
        """Runs the layers of this node.

        Args:
            batch: `tokens` [micro batch, seq] for the first node, `labels` for the last.
            inputs: outputs of the branches, or that of the node before.

        Returns:
            [joined seq, micro batch, hidden], or the mean loss of the tokens, in nats.
        """
        joined = None
        if self.is_first:
            tokens = batch["tokens"]
            text = self.gpt.embedding(input_ids=tokens, position_ids=_positions(tokens))
            joined = torch.cat([*inputs, text])
        else:
            self.gpt.set_input_tensor(inputs[0])
        labels = batch["labels"] if self.is_last else None
        none: Any = None
        output = self.gpt(none, none, none, decoder_input=joined, labels=labels)
        return output.float().mean() if self.is_last else output


class _TextLossGPT(ChunkedLogitsGPT):
    """A GPT that makes logits for the last rows only, those that have labels."""

    def _postprocess(
        self,
        hidden_states: Any,
        input_ids: Any,
        position_ids: Any,
        labels: Any,
        *args: Any,
        **more: Any,
    ) -> Any:
        if self.post_process:
            hidden_states = hidden_states[-labels.shape[1] :]
        return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **more)


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def _core(config: Config, num_layers: int) -> TransformerConfig:
    return dataclasses.replace(core_config(config), num_layers=num_layers)


def _block_of(layer: Any, count: int) -> Any:
    norm: Any = Norm
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _full(config: Config) -> Any:
    """The specification of a layer that attends to all positions."""
    spec: Any = layer_spec(config)
    attention = spec.submodules.self_attention
    attention.params = {**attention.params, "attn_mask_type": AttnMaskType.no_mask}
    attention.submodules.core_attention = FullAttention
    return spec


def build_nodes(
    shape: BranchedShape, config: Config, groups: ProcessGroupCollection, wanted: Sequence[int]
) -> dict[int, torch.nn.Module]:
    """Builds some nodes with their initial weights.

    Args:
        config: of the run; one rank holds a node whole, in fp32 or half precision as it says.

    Raises:
        ValueError: options that this model does not have.
    """
    if config.kernels.transformer_impl != "local" or config.moe.num_experts is not None:
        raise ValueError("a model with branches needs --transformer-impl local and no experts")
    if config.layout.tp * config.layout.pp * config.layout.cp > 1:
        raise ValueError("a rank holds nodes of a model with branches whole: no tp, pp or cp")
    seed_build(config.runtime.seed)
    places = [(b, part) for b in shape.branches for part in range(b.nodes)]
    found: dict[int, torch.nn.Module] = {}
    for n in wanted:
        if n < len(places):
            node: torch.nn.Module = BranchPart(shape, *places[n], config, groups)
            layers = places[n][0].num_layers
        else:
            node = DecoderPart(shape, n - len(places), config, groups)
            layers = shape.decoder_layers
        for param in node.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
        _draw(node, shape.nodes[n], config, layers)
        found[n] = node
    return found


@torch.no_grad()
def _draw(node: torch.nn.Module, name: str, config: Config, num_layers: int) -> None:
    """Fills the matrices of a node, each from a stream of its own."""
    initial = InitialWeights(init_method_std=config.model.init_method_std, num_layers=num_layers)
    for key, param in node.named_parameters():
        own = key.endswith(("patches.weight", "projection.weight"))
        if not own and initial.std(key) is None:
            continue
        generator = torch.Generator()
        generator.manual_seed(random_seed_at(config.runtime.seed, 0, "initial", name, key))
        full = torch.empty(param.shape, dtype=torch.float32)
        if own:
            # Inputs of unit size stay of unit size.
            full.normal_(0.0, param.shape[1] ** -0.5, generator=generator)
        else:
            initial.fill(full, key, generator)
        param.copy_(full)
