"""The parallel layout of a run and the rules that make one legal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.training.common.errors import UsageError

_SIZES = ("tp", "pp", "vpp", "dp")
LAYOUT_KEYS = (*_SIZES, "ep", "etp", "cut")
"""Keys of `Layout.to_json`."""
_TEXT = re.compile(
    r"tp(?P<tp>\d+)\.pp(?P<pp>\d+)(?:\.vpp(?P<vpp>\d+))?(?:\.ep(?P<ep>\d+))?(?:\.etp(?P<etp>\d+))?"
    r"\.dp(?P<dp>\d+)(?:\.cut(?P<cut>[\dx-]+))?"
)
_OLD_TEXT = re.compile(r"tp=(?P<tp>\d+) pp=(?P<pp>\d+)(?: vpp=(?P<vpp>\d+))? dp=(?P<dp>\d+)")
_MOST_CHUNKS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks of a job share one model.

    The fields carry the short names of Megatron's `tensor_model_parallel_size`,
    `pipeline_model_parallel_size`, `virtual_pipeline_model_parallel_size` and
    `data_parallel_size`. Its one text is `str(layout)`, such as `tp2.pp4.vpp2.dp8`.

    Raises:
        ValueError: a size is not an integer of at least 1, `vpp` is used without a pipeline, or
            `layer_partition` is not one number for every chunk.
    """

    tp: int = 1
    """Tensor parallel size: ranks that share each layer."""
    pp: int = 1
    """Pipeline parallel size: ranks that share the stack of layers."""
    vpp: int = 1
    """Virtual pipeline size: model chunks held by each pipeline rank; 1 means no interleaving."""
    dp: int = 1
    """Data parallel size: copies of the model, each reading other samples."""
    ep: int = 1
    """Expert parallel size: groups of ranks that each hold other experts of a layer."""
    etp: int | None = None
    """Tensor parallel size of experts: ranks that share each expert. None means `tp`, and that
    number becomes None."""
    layer_partition: tuple[int, ...] | None = None
    """[pp * vpp] layers of every model chunk in the order of the model (stage k mod pp holds chunk
    k). None means equal chunks; equal numbers become None."""

    def __post_init__(self) -> None:
        if self.etp == self.tp:
            object.__setattr__(self, "etp", None)
        for name in (*_SIZES, "ep", "expert_tensor_parallel_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"layout size {name} must be an integer >= 1, got {value!r}")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} needs a pipeline (pp > 1)")
        ranks = self.ep * self.expert_tensor_parallel_size
        if self.tp * self.dp % ranks != 0:
            raise ValueError(
                f"the {self.tp * self.dp} ranks of a stage do not divide by ep x etp = {ranks}"
            )
        if self.layer_partition is not None:
            counts = _checked_partition(self.layer_partition, self.pp * self.vpp)
            object.__setattr__(self, "layer_partition", counts if len(set(counts)) > 1 else None)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return self.tp * self.pp

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Ranks that share each expert."""
        return self.etp or self.tp

    @property
    def expert_data_parallel_size(self) -> int:
        """Copies of each expert."""
        return self.tp * self.dp // (self.ep * self.expert_tensor_parallel_size)

    @property
    def experts_see_whole_samples(self) -> bool:
        """Whether the ranks that share the experts of a layer hold whole samples between them, as
        its dense parameters see them. Else no gradient of an expert is one of some samples."""
        return self.ep * self.expert_tensor_parallel_size % self.tp == 0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """tp, pp, vpp, dp: everything but the experts' sizes and the layer partition."""
        return self.tp, self.pp, self.vpp, self.dp

    def layers_of_chunks(self, num_layers: int) -> tuple[int, ...]:
        """[pp * vpp] layers of every chunk in the order of the model.

        Args:
            num_layers: of the whole model; a legal layout of it (`layout_problems`).
        """
        chunks = self.pp * self.vpp
        return self.layer_partition or (num_layers // chunks,) * chunks

    def layers_of_stage(self, num_layers: int, stage: int) -> list[range]:
        """Numbers of the layers of each chunk of a stage.

        Args:
            num_layers: of the whole model; a legal layout of it.
            stage: rank in the pipeline.
        """
        counts = self.layers_of_chunks(num_layers)
        ends = list(itertools.accumulate(counts))
        # Interleaved: a stage has every pp-th chunk of the stack.
        own = range(stage, len(counts), self.pp)
        return [range(ends[k] - counts[k], ends[k]) for k in own]

    @property
    def batch_unit(self) -> int:
        """Samples that every global batch is a multiple of, in micro-batches of one."""
        return self.dp * (self.pp if self.vpp > 1 else 1)

    def __str__(self) -> str:
        virtual = f".vpp{self.vpp}" if self.vpp > 1 else ""
        experts = f".ep{self.ep}" if self.ep > 1 else ""
        experts += f".etp{self.etp}" if self.etp else ""
        counts = f".cut{_runs(self.layer_partition)}" if self.layer_partition else ""
        return f"tp{self.tp}.pp{self.pp}{virtual}{experts}.dp{self.dp}{counts}"

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Inverse of `str`; also reads the older text `tp=2 pp=4 vpp=2 dp=8`.

        Raises:
            ValueError: another form.
        """
        found = _TEXT.fullmatch(text) or _OLD_TEXT.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is no layout such as tp2.pp1.dp4")
        tp, pp, vpp, dp = (int(found[name] or 1) for name in _SIZES)
        more = found.groupdict()
        runs, ep, etp = more.get("cut"), int(more.get("ep") or 1), more.get("etp")
        counts = None if runs is None else _from_runs(runs, pp * vpp)
        experts = {"ep": ep, "etp": etp and int(etp)}
        return cls(tp=tp, pp=pp, vpp=vpp, dp=dp, layer_partition=counts, **experts)

    @classmethod
    def from_record(cls, value: str | Sequence[int]) -> Layout:
        """Reads a text, or the list of `sizes` that older journals and checkpoints hold.

        Raises:
            ValueError: another form.
        """
        if isinstance(value, str):
            return cls.from_text(value)
        return cls(**dict(zip(_SIZES, value, strict=True)))

    def to_json(self) -> dict[str, Any]:
        """Returns the four sizes as plain JSON types; those of experts, and the layer partition as
        `cut`, only where they differ from the default."""
        data: dict[str, Any] = dict(zip(_SIZES, self.sizes))
        data |= {"ep": self.ep} if self.ep > 1 else {}
        data |= {"etp": self.etp} if self.etp else {}
        return {**data, "cut": list(self.layer_partition)} if self.layer_partition else data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Layout:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: an unknown key or an illegal size.
        """
        unknown = sorted(set(data) - set(LAYOUT_KEYS))
        if unknown:
            raise ValueError(f"unknown layout keys: {', '.join(unknown)}")
        sizes = {name: data[name] for name in LAYOUT_KEYS[:-1] if name in data}
        return cls(**sizes, layer_partition=data.get("cut"))

    @classmethod
    def of_arguments(cls, arguments: Mapping[str, Any]) -> Layout:
        """Reads the sizes that a trainer's arguments hold, by field name, with `data_parallel_size`
        derived; what is missing or None has its default.

        Raises:
            ValueError: an illegal size.
        """

        def size(name: str, default: int | None = 1) -> Any:
            value = arguments.get(f"{name}_parallel_size")
            return default if value is None else value

        return cls(
            tp=size("tensor_model"),
            pp=size("pipeline_model"),
            vpp=size("virtual_pipeline_model"),
            ep=size("expert_model"),
            etp=size("expert_tensor", None),
            dp=size("data"),
            layer_partition=arguments.get("layers_of_chunks"),
        )

    def to_arguments(self) -> dict[str, Any]:
        """Inverse of `of_arguments`."""
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "data_parallel_size": self.dp,
            "layers_of_chunks": self.layer_partition,
        }

    @classmethod
    def from_world(
        cls,
        world_size: int,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        *,
        ep: int = 1,
        etp: int | None = None,
    ) -> Layout:
        """Gives the ranks that tensor and pipeline parallelism leave over to data parallelism.

        Raises:
            UsageError: the sizes do not divide the world, or are illegal by themselves.
        """
        names = (
            ("--tensor-model-parallel-size", tp),
            ("--pipeline-model-parallel-size", pp),
            ("--num-virtual-stages-per-pipeline-rank", vpp),
            ("--expert-model-parallel-size", ep),
            ("--expert-tensor-parallel-size", tp if etp is None else etp),
        )
        for flag, value in names:
            if value < 1:
                raise UsageError(f"{flag} {value} must be at least 1")
        if vpp > 1 and pp == 1:
            raise UsageError(
                f"{vpp} virtual pipeline stages need --pipeline-model-parallel-size of at least 2; "
                "raise it or drop the virtual pipeline flag"
            )
        if world_size % (tp * pp) != 0:
            raise UsageError(
                f"world size {world_size} is not divisible by --tensor-model-parallel-size {tp} x "
                f"--pipeline-model-parallel-size {pp} = {tp * pp}; start a multiple of {tp * pp} "
                "ranks or lower one of the two"
            )
        stage, experts = world_size // pp, ep * (etp or tp)
        if stage % experts != 0:
            raise UsageError(
                f"the {stage} ranks of a pipeline stage are not divisible by "
                f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp or tp} = "
                f"{experts}; lower one of the two"
            )
        return cls(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=world_size // (tp * pp))


def layout_problems(
    layout: Layout,
    *,
    num_layers: int,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int,
    seq_length: int,
    padded_vocab_size: int | None,
    sequence_parallel: bool,
    split_widths: Mapping[str, int] = MappingProxyType({}),
    needs_one_stage: bool = False,
    experts: ExpertSizes | None = None,
) -> list[str]:
    """Lists why a model cannot be laid out this way.

    Args:
        layout: the layout to judge.
        num_layers: transformer layers of the whole model.
        num_attention_heads: query heads of one layer.
        num_query_groups: key-value heads of one layer.
        ffn_hidden_size: width of the MLP.
        seq_length: tokens per sample.
        padded_vocab_size: rows of the embedding, or None while it is not known.
        sequence_parallel: whether activations are split over the sequence between tensor-parallel
            regions.
        split_widths: further widths that tensor parallelism splits, by the flags that set them.
        needs_one_stage: whether the model predicts further tokens with tied embeddings.
        experts: what limits the layout of a mixture of experts; None for a dense model.

    Returns:
        One sentence per broken rule, naming the flag, the values and the fix; empty if the layout
        is legal.
    """
    tp = layout.tp
    tp_fix = f"choose another --tensor-model-parallel-size (now {tp})"
    problems = []
    stages = layout.pp * layout.vpp
    if layout.layer_partition and sum(layout.layer_partition) != num_layers:
        problems.append(
            f"the chunks of {layout} have {sum(layout.layer_partition)} layers and --num-layers is "
            f"{num_layers}; give --pipeline-model-parallel-layout as many"
        )
    if num_layers % stages != 0 and not layout.layer_partition:
        problems.append(
            f"--num-layers {num_layers} cannot be split over {layout.pp} pipeline ranks x "
            f"{layout.vpp} virtual stages evenly; use a multiple of {stages}, change "
            "--pipeline-model-parallel-size or give --pipeline-model-parallel-layout"
        )
    if num_attention_heads % tp != 0:
        problems.append(
            f"--num-attention-heads {num_attention_heads} is not divisible by {tp}; {tp_fix}"
        )
    if num_query_groups % tp != 0 and tp % num_query_groups != 0:
        problems.append(
            f"--num-query-groups {num_query_groups} neither divides nor is divided by {tp}; "
            f"{tp_fix}"
        )
    if ffn_hidden_size % tp != 0:
        problems.append(f"--ffn-hidden-size {ffn_hidden_size} is not divisible by {tp}; {tp_fix}")
    if sequence_parallel and seq_length % tp != 0:
        problems.append(
            f"--seq-length {seq_length} is not divisible by {tp} as --sequence-parallel needs; "
            f"{tp_fix}"
        )
    for flags, width in split_widths.items():
        if width % tp != 0:
            problems.append(f"{flags} {width} is not divisible by {tp}; {tp_fix}")
    if needs_one_stage and layout.pp > 1:
        problems.append(
            "--mtp-num-layers in a pipeline needs --untie-embeddings-and-output-weights; add it or "
            f"choose --pipeline-model-parallel-size 1 (now {layout.pp})"
        )
    problems += expert_problems(layout, experts, sequence_parallel=sequence_parallel)
    if padded_vocab_size is not None and padded_vocab_size % tp != 0:
        problems.append(
            f"the padded vocabulary of {padded_vocab_size} rows is not divisible by {tp}; start "
            f"the run with --pad-vocab-for-tensor-parallel-size {tp}"
        )
    return problems


def further_sizes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `layout_problems` must know of some models only, as keyword arguments.

    Args:
        arguments: flags by field name, as derived or as stored.
    """
    widths = {}
    if arguments.get("multi_latent_attention"):
        if arguments.get("q_lora_rank"):
            widths["--q-lora-rank"] = arguments["q_lora_rank"]
        rotated = arguments["qk_pos_emb_head_dim"]
        widths["--kv-lora-rank + --qk-pos-emb-head-dim"] = arguments["kv_lora_rank"] + rotated
    is_further = bool(arguments.get("mtp_num_layers"))
    if is_further:
        widths["--mtp-num-layers with --hidden-size"] = arguments["hidden_size"]
    is_tied = not arguments.get("untie_embeddings_and_output_weights")
    return {
        "split_widths": widths,
        "needs_one_stage": is_further and is_tied,
        "experts": ExpertSizes.of(arguments),
    }


@dataclass(frozen=True, kw_only=True)
class ExpertSizes:
    """What limits the layout of a mixture of experts."""

    num_experts: int
    """Of a layer."""
    moe_ffn_hidden_size: int
    """Width of an expert."""
    moe_shared_expert_intermediate_size: int | None
    """Width of the shared expert; None: there is none."""
    add_bias_linear: bool
    """Whether experts have biases."""
    only_allgather_over_both: bool
    """Whether rows cannot go to experts by all-to-all where both expert parallel sizes are above 1,
    as with gloo."""
    use_tp_pp_dp_mapping: bool
    """Whether ranks are numbered with pipeline before data parallelism."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ExpertSizes | None:
        """Reads flags by field name; None for a dense model."""
        if not arguments.get("num_experts"):
            return None
        dispatcher = arguments.get("moe_token_dispatcher_type") or "allgather"
        is_gloo = arguments.get("distributed_backend") == "gloo"
        return cls(
            num_experts=arguments["num_experts"],
            moe_ffn_hidden_size=arguments.get("moe_ffn_hidden_size")
            or arguments["ffn_hidden_size"],
            moe_shared_expert_intermediate_size=arguments.get(
                "moe_shared_expert_intermediate_size"
            ),
            add_bias_linear=bool(arguments.get("add_bias_linear")),
            only_allgather_over_both=is_gloo and dispatcher == "alltoall",
            use_tp_pp_dp_mapping=bool(arguments.get("use_tp_pp_dp_mapping")),
        )


def expert_problems(
    layout: Layout, experts: ExpertSizes | None, *, sequence_parallel: bool
) -> list[str]:
    """Lists why experts cannot be laid out this way; as `layout_problems`."""
    ep, etp = layout.ep, layout.expert_tensor_parallel_size
    if experts is None:
        is_plain = ep == 1 and layout.etp is None
        return [] if is_plain else [f"{layout} has sizes of experts and the model has none"]
    fix = f"choose another --expert-tensor-parallel-size (now {etp})"
    problems = []
    if experts.num_experts % ep != 0:
        problems.append(
            f"--num-experts {experts.num_experts} is not divisible by {ep}; choose another "
            f"--expert-model-parallel-size (now {ep})"
        )
    width = experts.moe_ffn_hidden_size
    if width % etp != 0:
        problems.append(f"--moe-ffn-hidden-size {width} is not divisible by {etp}; {fix}")
    shared = experts.moe_shared_expert_intermediate_size
    if shared is not None and shared % layout.tp != 0:
        problems.append(
            f"--moe-shared-expert-intermediate-size {shared} is not divisible by {layout.tp}; "
            f"choose another --tensor-model-parallel-size (now {layout.tp})"
        )
    if layout.tp > 1 and not sequence_parallel:
        problems.append(
            "--num-experts under tensor parallelism needs --sequence-parallel; add it or choose "
            f"--tensor-model-parallel-size 1 (now {layout.tp})"
        )
    if etp > 1 and experts.add_bias_linear:
        problems.append(
            f"--expert-tensor-parallel-size {etp} needs --disable-bias-linear; add it or choose 1"
        )
    if ep > 1 and etp > 1 and experts.only_allgather_over_both:
        problems.append(
            f"gloo has no all-to-all over --expert-model-parallel-size {ep} and "
            f"--expert-tensor-parallel-size {etp}; give --moe-token-dispatcher-type allgather"
        )
    copies = layout.expert_data_parallel_size
    if experts.use_tp_pp_dp_mapping and layout.pp > 1 and copies != layout.dp:
        problems.append(
            f"--use-tp-pp-dp-mapping in a pipeline needs as many copies of the experts ({copies}) "
            f"as of the model ({layout.dp}); drop the flag or choose --expert-tensor-parallel-size "
            f"{layout.tp} and --expert-model-parallel-size 1"
        )
    return problems


def recompute_problems(
    layout: Layout, *, num_layers: int, method: str | None, recompute_num_layers: int
) -> list[str]:
    """Lists why whole layers cannot be computed again this way.

    Args:
        layout: a legal one.
        num_layers: transformer layers of the whole model.
        method: `uniform` or `block`.
        recompute_num_layers: layers of a unit, or layers of every chunk.

    Returns:
        One sentence per broken rule, naming the flag, the values and the fix.
    """
    counts = set(layout.layers_of_chunks(num_layers)) - {0}
    if recompute_num_layers > max(counts):
        return [
            f"--recompute-num-layers {recompute_num_layers} is more than the {max(counts)} layers "
            "of one pipeline stage; lower it"
        ]
    broken = sorted(n for n in counts if n % max(recompute_num_layers, 1))
    if method == "uniform" and broken:
        # megatron-core would end with an IndexError in the first forward pass.
        return [
            f"--recompute-num-layers {recompute_num_layers} does not divide the {broken[0]} layers "
            "of a pipeline stage, as --recompute-method uniform needs; lower it or use block"
        ]
    return []


def group_of_microbatches(layout: Layout, num_microbatches: int, asked: int | None = None) -> int:
    """Micro-batches that a chunk of an interleaved pipeline takes in a row.

    Args:
        layout: with a virtual pipeline.
        num_microbatches: of one replica in a step.
        asked: `--microbatch-group-size-per-virtual-pipeline-stage`.

    Returns:
        What is asked for, if megatron-core can schedule that; else the pipeline size.
    """
    if asked is None or not layout.pp <= asked <= num_microbatches:
        return layout.pp
    rest = num_microbatches % asked
    return asked if rest == 0 or rest >= layout.pp else layout.pp


def batch_problems(
    layout: Layout,
    micro_batch_size: int,
    global_batch_size: int,
    *,
    uneven: bool = False,
    group_size: int | None = None,
) -> list[str]:
    """Lists why a global batch cannot be split into micro-batches on this layout.

    Args:
        layout: the layout to judge.
        micro_batch_size: samples of one forward pass on one data-parallel rank.
        global_batch_size: samples of one optimizer step.
        uneven: whether the last micro-batch of every replica may be smaller; without effect on a
            pipeline, whose stages exchange one shape.
        group_size: `--microbatch-group-size-per-virtual-pipeline-stage`.

    Returns:
        One sentence per broken rule, naming the flag, the values and the fix; empty if it fits.
    """
    if micro_batch_size < 1 or global_batch_size < 1:
        return [
            f"--micro-batch-size {micro_batch_size} and --global-batch-size {global_batch_size} "
            "must both be at least 1"
        ]
    if uneven and layout.pp == 1:
        if global_batch_size % layout.dp == 0:
            return []
        return [
            f"--global-batch-size {global_batch_size} is not divisible by the data parallel size "
            f"{layout.dp}; use {_nearest_multiples(global_batch_size, layout.dp)}"
        ]
    unit = micro_batch_size * layout.dp
    # The interleaved schedule works on groups of PP micro-batches and cannot split the last one.
    group = layout.pp if layout.vpp > 1 else 1
    if global_batch_size % unit != 0:
        return [
            f"--global-batch-size {global_batch_size} is not divisible by --micro-batch-size "
            f"{micro_batch_size} x data parallel size {layout.dp} = {unit}; use "
            f"{_nearest_multiples(global_batch_size, unit * group)}"
        ]
    num_microbatches = global_batch_size // unit
    taken = group_of_microbatches(layout, num_microbatches, group_size)
    if num_microbatches % group != 0 and taken == group:
        return [
            f"--global-batch-size {global_batch_size} gives {num_microbatches} micro-batches, "
            f"which a virtual pipeline over {layout.pp} ranks cannot schedule; use "
            f"{_nearest_multiples(global_batch_size, unit * group)}"
        ]
    return []


def _checked_partition(counts: Sequence[int], chunks: int) -> tuple[int, ...]:
    if not isinstance(counts, (list, tuple)):
        raise ValueError(f"a layer partition is a list of whole numbers, got {counts!r}")
    numbers = tuple(counts)
    if any(not isinstance(n, int) or isinstance(n, bool) for n in numbers):
        raise ValueError(f"a layer partition is whole numbers, got {list(numbers)}")
    if len(numbers) != chunks:
        raise ValueError(f"{chunks} chunks need as many layer counts, got {len(numbers)}")
    # The embedding and the head may stand alone.
    if min(numbers) < 0 or 0 in numbers[1:-1] or not any(numbers):
        raise ValueError(
            f"every chunk but the first and the last needs a layer, got {list(numbers)}"
        )
    return numbers


def _runs(counts: Sequence[int]) -> str:
    runs = [(n, len(list(same))) for n, same in itertools.groupby(counts)]
    return "-".join(f"{n}x{times}" if times > 1 else str(n) for n, times in runs)


def _from_runs(text: str, chunks: int) -> tuple[int, ...]:
    if chunks > _MOST_CHUNKS:
        raise ValueError(f"no model has {chunks} chunks")
    numbers: list[int] = []
    for run in text.split("-"):
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", run)
        times = int(found[2] or 1) if found else 0
        if not found or times > chunks:
            raise ValueError(f"{text!r} is no layer partition such as 5-4x2-3 of {chunks} chunks")
        numbers += [int(found[1])] * times
    return tuple(numbers)


def _nearest_multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)
