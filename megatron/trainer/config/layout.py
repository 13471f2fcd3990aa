"""The parallel layout of a run: its sizes, its one text and its forms in files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.trainer.common.errors import UsageError

_SIZES = ("tp", "pp", "vpp", "dp")
LAYOUT_KEYS = (*_SIZES, "cp", "ep", "etp", "cut")
"""Keys of `Layout.to_json`."""
_TEXT = re.compile(
    r"tp(?P<tp>\d+)(?:\.cp(?P<cp>\d+))?\.pp(?P<pp>\d+)(?:\.vpp(?P<vpp>\d+))?"
    r"(?:\.ep(?P<ep>\d+))?(?:\.etp(?P<etp>\d+))?\.dp(?P<dp>\d+)(?:\.cut(?P<cut>[\dx-]+))?"
)
_MAX_CHUNKS = 1 << 16


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
    cp: int = 1
    """Context parallel size: ranks that share the tokens of each sample."""
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
        for name in (*_SIZES, "cp", "ep", "expert_tensor_parallel_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"layout size {name} must be an integer >= 1, got {value!r}")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp = {self.vpp} needs a pipeline (pp > 1)")
        ranks = self.ep * self.expert_tensor_parallel_size
        if self.ranks_of_a_stage % ranks != 0:
            raise ValueError(
                f"the {self.ranks_of_a_stage} ranks of a stage do not divide by ep x etp = {ranks}"
            )
        if self.layer_partition is not None:
            counts = _checked_partition(self.layer_partition, self.pp * self.vpp)
            object.__setattr__(self, "layer_partition", counts if len(set(counts)) > 1 else None)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ranks_of_a_stage * self.pp

    @property
    def ranks_of_a_stage(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def copies(self) -> int:
        """Copies of every weight outside the experts, over which the distributed optimizer shards
        its state: Megatron's data parallel group with context parallelism."""
        return self.cp * self.dp

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Ranks that share each expert."""
        return self.etp or self.tp

    @property
    def expert_data_parallel_size(self) -> int:
        """Copies of each expert."""
        return self.ranks_of_a_stage // (self.ep * self.expert_tensor_parallel_size)

    @property
    def experts_see_whole_samples(self) -> bool:
        """Whether the ranks that share the experts of a layer hold whole samples between them, as
        its dense parameters see them. Else no gradient of an expert is one of some samples."""
        return self.ep * self.expert_tensor_parallel_size % (self.tp * self.cp) == 0

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """tp, pp, vpp, dp: everything but the context parallel size, the experts' sizes and the
        layer partition."""
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
        context = f".cp{self.cp}" if self.cp > 1 else ""
        return f"tp{self.tp}{context}.pp{self.pp}{virtual}{experts}.dp{self.dp}{counts}"

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Inverse of `str`.

        Raises:
            ValueError: another form.
        """
        found = _TEXT.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is not a layout such as tp2.pp1.dp4")
        tp, pp, vpp, dp = (int(found[name] or 1) for name in _SIZES)
        more = found.groupdict()
        runs, ep, etp = more.get("cut"), int(more.get("ep") or 1), more.get("etp")
        counts = None if runs is None else _from_runs(runs, pp * vpp)
        further = {"cp": int(more.get("cp") or 1), "ep": ep, "etp": etp and int(etp)}
        return cls(tp=tp, pp=pp, vpp=vpp, dp=dp, layer_partition=counts, **further)

    def to_json(self) -> dict[str, Any]:
        """Returns the four sizes as plain JSON types; that of context parallelism, those of experts
        and the layer partition as `cut` only where they differ from the default."""
        data: dict[str, Any] = dict(zip(_SIZES, self.sizes))
        data |= {"cp": self.cp} if self.cp > 1 else {}
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
            cp=size("context"),
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
            "context_parallel_size": self.cp,
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
        cp: int = 1,
        ep: int = 1,
        etp: int | None = None,
    ) -> Layout:
        """Gives the ranks that the other sizes leave over to data parallelism.

        Raises:
            UsageError: the sizes do not divide the world, or are illegal by themselves.
        """
        names = (
            ("--tensor-model-parallel-size", tp),
            ("--context-parallel-size", cp),
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
        replica = tp * cp * pp
        if world_size % replica != 0:
            context = f"--context-parallel-size {cp} x " if cp > 1 else ""
            raise UsageError(
                f"world size {world_size} is not divisible by --tensor-model-parallel-size {tp} x "
                f"{context}--pipeline-model-parallel-size {pp} = {replica}; start a multiple of "
                f"{replica} ranks or lower one of them"
            )
        stage, experts = world_size // pp, ep * (etp or tp)
        if stage % experts != 0:
            raise UsageError(
                f"the {stage} ranks of a pipeline stage are not divisible by "
                f"--expert-model-parallel-size {ep} x --expert-tensor-parallel-size {etp or tp} = "
                f"{experts}; lower one of the two"
            )
        return cls(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=etp, dp=world_size // replica)


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
    if chunks > _MAX_CHUNKS:
        raise ValueError(f"no model has {chunks} chunks")
    numbers: list[int] = []
    for run in text.split("-"):
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", run)
        times = int(found[2] or 1) if found else 0
        if not found or times > chunks:
            raise ValueError(f"{text!r} is no layer partition such as 5-4x2-3 of {chunks} chunks")
        numbers += [int(found[1])] * times
    return tuple(numbers)
