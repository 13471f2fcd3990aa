"""The GPUs that have a name: data sheets, usual nodes of each kind, and what they are called."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from copus_ext.cost_model.spec_file import SpecError, is_positive
from megatron.trainer.common.program import unknown


@dataclass(frozen=True, kw_only=True)
class GpuSpec:
    name: str
    """What to call it."""
    memory_bytes: float
    peak_flops: float
    """Dense bf16 peak, FLOP/s; of a V100 that of fp16."""
    hbm_bytes_per_s: float
    num_sms: int
    fp32_peak_flops: float | None = None
    """Peak in fp32 (TF32 where that is the default); None: half of the bf16 one."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise SpecError(f"gpu.name {str(self.name)[:60]!r} must be a text")
        for field in fields(self):
            value = getattr(self, field.name)
            may_lack = field.name == "fp32_peak_flops" and value is None
            if not may_lack and field.name != "name" and not is_positive(value):
                raise SpecError(f"gpu.{field.name} {str(value)[:60]!r} must be positive")

    def peak(self, precision: str) -> float:
        if precision != "fp32":
            return self.peak_flops
        return self.fp32_peak_flops or self.peak_flops / 2


def _gpu(name: str, gib: float, tflops: float, tbps: float, sms: int, fp32: float) -> GpuSpec:
    return GpuSpec(
        name=name,
        memory_bytes=gib * 2**30,
        peak_flops=tflops * 1e12,
        hbm_bytes_per_s=tbps * 1e12,
        num_sms=sms,
        fp32_peak_flops=fp32 * 1e12,
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("V100-16GB", 16, 125, 0.9, 80, 15.7),
        _gpu("V100-32GB", 32, 125, 0.9, 80, 15.7),
        _gpu("A100-40GB", 40, 312, 1.555, 108, 156),
        _gpu("A100-80GB", 80, 312, 2.039, 108, 156),
        _gpu("A800-80GB", 80, 312, 2.039, 108, 156),
        _gpu("H100-80GB", 80, 989, 3.35, 132, 494),
        _gpu("H800-80GB", 80, 989, 3.35, 132, 494),
        _gpu("GH200-96GB", 96, 989, 4.0, 132, 494),
        _gpu("GH200-144GB", 144, 989, 4.9, 132, 494),
        _gpu("H200-141GB", 141, 989, 4.8, 132, 494),
        _gpu("B200-180GB", 180, 2250, 8.0, 148, 1125),
        _gpu("MI210-64GB", 64, 181, 1.6, 104, 22.6),
        # A card has two of these, and a rank runs on one.
        _gpu("MI250-64GB", 64, 181, 1.6, 104, 22.6),
        _gpu("CPU-rank", 8, 0.06, 0.01, 1, 0.06),
    )
}
"""Data sheets: memory GiB, dense bf16 TFLOP/s, TB/s, multiprocessors, TF32 or fp32 TFLOP/s."""
BEFORE_A100 = ("V100-16GB", "V100-32GB")
"""Without bf16, and too old for flash attention and Transformer Engine."""

KINDS = {
    "v100-16g": ("V100-16GB", 8, 150e9, 50e9, "a100-80g"),
    "v100-32g": ("V100-32GB", 8, 150e9, 100e9, "a100-80g"),
    "a100-40g": ("A100-40GB", 8, 300e9, 100e9, "a100-80g"),
    "a100-80g": ("A100-80GB", 8, 300e9, 100e9, "a100-80g"),
    "a800-80g": ("A800-80GB", 8, 200e9, 100e9, "a100-80g"),
    "h100-80g": ("H100-80GB", 8, 450e9, 400e9, "h100-80g"),
    "h800-80g": ("H800-80GB", 8, 200e9, 400e9, "h100-80g"),
    "gh200-96g": ("GH200-96GB", 4, 450e9, 100e9, "h100-80g"),
    "gh200-144g": ("GH200-144GB", 4, 450e9, 100e9, "h100-80g"),
    "h200-141g": ("H200-141GB", 8, 450e9, 400e9, "h200-141g"),
    "b200-180g": ("B200-180GB", 8, 900e9, 400e9, "h100-80g"),
    "mi210-64g": ("MI210-64GB", 8, 100e9, 25e9, "mi210-64g"),
    "mi250-64g": ("MI250-64GB", 8, 100e9, 100e9, "mi210-64g"),
    "cpu": ("CPU-rank", 0, 2e9, 1e9, "cpu"),
}
"""GPU, GPUs of a node (0: all are in one), bytes/s of a GPU's link and of a node's network in one
direction, constants. NVLink has 300 GB/s both ways together on V100, 400 on A800 and H800, 600 on
A100 and 900 on H100. Four GH200 share a node, each with a network card of its own."""
_CALLED = re.compile(
    r"(?:nvidia[ -]|tesla |amd instinct )?([a-z]+\d+[a-z]?)(?:-sxm\d?)?"
    r"(?:[ -](\d+) ?gi?b?)?(?: hbm\d\w?)?"
)


def kinds_named(text: str) -> list[str]:
    """The preset kinds of a name such as a100-80g, H100, A800-80GB or NVIDIA A800-SXM4-80GB, in any
    case. Without a size there may be several."""
    name = text.strip().lower()
    if name in KINDS:
        return [name]
    by_gpu = {gpu.lower(): kind for kind, (gpu, *_) in KINDS.items()}
    if name in by_gpu or (found := _CALLED.fullmatch(name)) is None:
        return [by_gpu[name]] if name in by_gpu else []
    model, size = found.groups()
    kinds = [kind for kind in KINDS if kind.split("-")[0] == model]
    return [kind for kind in kinds if size is None or kind == f"{model}-{size}g"]


def gpu_named(name: str, where: str = "--gpu") -> GpuSpec:
    """A GPU of the list, by its name in any case, its preset kind, or as its driver calls it.

    Args:
        name: of the GPU.
        where: flag or field that names it.

    Raises:
        SpecError: it is not there, or names several.
    """
    kinds = kinds_named(name)
    if len(kinds) > 1:
        raise SpecError(f"{where} {name}: write {' or '.join(KINDS[kind][0] for kind in kinds)}")
    if not kinds:
        more = "describe it in the file of --cluster with memory_bytes and peak_flops"
        raise SpecError(f"{where} {name}: {unknown(name, list(GPUS))}; or {more}")
    return GPUS[KINDS[kinds[0]][0]]


def kind_of(name: str, memory_mib: float) -> str:
    """The preset kind of a GPU as its driver calls it.

    Raises:
        SpecError: none describes it.
    """
    for kind, (gpu, *_) in KINDS.items():
        model = gpu.split("-")[0]
        nominal = GPUS[gpu].memory_bytes / 2**20
        if model in name and 0.85 < memory_mib / nominal < 1.15:
            return kind
    raise SpecError(
        f"no preset describes {name} with {memory_mib:.0f} MiB; give --cluster a preset that is "
        "like it, such as a100-80g:8, or a JSON file"
    )
