"""The machine: GPUs, nodes, links; by preset, from a JSON file, or given number by number."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.gpus import GPUS, GpuSpec, checked, gpu_named, is_positive, quantity
from copus_ext.cost_model.links import Links
from copus_ext.cost_model.model_spec import SpecError
from copus_ext.cost_model.nodes import NodeSpec, nodes_from_json, nodes_to_json
from copus_ext.cost_model.spec_file import read_json

_CONSTANTS = Path(__file__).parent / "data"
_MOST_GPUS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of as many GPUs each; equal ones, unless `nodes` or `links` say otherwise."""

    gpu: GpuSpec
    """What a rank runs on."""
    num_nodes: int
    """Nodes."""
    gpus_per_node: int
    """GPUs of a node."""
    intra_bytes_per_s: float
    """Link of a GPU to the others of its node, one direction."""
    nic_bytes_per_s: float
    """Network of a whole node, one direction."""
    constants: str = "a100-80g"
    """Name of the fitted constants (`copus_ext/cost_model/data/NAME.json`)."""
    links: Links | None = None
    """What every pair of nodes was measured to have; None: all pairs have `nic_bytes_per_s`."""
    nodes: tuple[NodeSpec, ...] = ()
    """What every node is; none: all are of `gpu`."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node"):
            value = getattr(self, name)
            if not (isinstance(value, int) and is_positive(value) and value <= _MOST_GPUS):
                raise SpecError(f"cluster.{name} {str(value)[:60]} must be a whole number from 1")
        if self.world_size > _MOST_GPUS:
            raise SpecError(f"a cluster of {self.world_size} GPUs is more than {_MOST_GPUS}")
        for name in ("intra_bytes_per_s", "nic_bytes_per_s"):
            if not is_positive(value := getattr(self, name)):
                raise SpecError(f"cluster.{name} {str(value)[:60]!r} must be positive")
        if self.links is not None and self.links.num_nodes != self.num_nodes:
            has = self.links.num_nodes
            raise SpecError(
                f"links.bytes_per_s is {has}x{has} but the cluster has {self.num_nodes} nodes; "
                f"measure again or give num_nodes {has}"
            )
        if self.nodes and len(self.nodes) != self.num_nodes:
            raise SpecError(
                f"nodes describes {len(self.nodes)} nodes and the cluster has {self.num_nodes}; "
                "make their counts add up"
            )

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.num_nodes * self.gpus_per_node

    def row_fields(self, precision: str) -> dict[str, Any]:
        """The machine's fields of `Rows`."""
        return {
            "peak_flops": self.gpu.peak(precision),
            "hbm_bytes_per_s": self.gpu.hbm_bytes_per_s,
            "num_sms": self.gpu.num_sms,
            "gpus_per_node": self.gpus_per_node,
            "intra_bytes_per_s": self.intra_bytes_per_s,
            "nic_bytes_per_s": self.nic_bytes_per_s,
            "on_cpu": self.constants == "cpu",
        }

    def load_constants(self) -> Constants:
        """The constants that go with this machine.

        Raises:
            SpecError: no such file.
        """
        return Constants.load(self.constants_file)

    @property
    def constants_file(self) -> Path:
        """Where they come from.

        Raises:
            SpecError: no such file.
        """
        known = {path.stem: path for path in sorted(_CONSTANTS.glob("*.json"))}
        if not isinstance(self.constants, str) or self.constants not in known:
            shown = str(self.constants)[:60]
            raise SpecError(f"constants {shown!r} are unknown; known: {', '.join(known)}")
        return known[self.constants]

    def resize(self, world_size: int) -> ClusterSpec:
        """The same kind of machine with so many GPUs; measured links and unequal nodes are those of
        all of it and stay only with them.

        Raises:
            SpecError: they do not fill whole nodes.
        """
        if world_size < 1:
            raise SpecError(f"a cluster needs at least 1 GPU, not {world_size}")
        if world_size == self.world_size:
            return self
        if world_size <= self.gpus_per_node:
            return replace(self, num_nodes=1, gpus_per_node=world_size, links=None, nodes=())
        if world_size % self.gpus_per_node:
            raise SpecError(
                f"{world_size} GPUs do not fill nodes of {self.gpus_per_node}; use a multiple"
            )
        return replace(self, num_nodes=world_size // self.gpus_per_node, links=None, nodes=())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = asdict(self)
        del data["links"], data["nodes"]
        if self.links is not None:
            data["links"] = self.links.to_json()
        if self.nodes:
            data["nodes"] = nodes_to_json(self.nodes)
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ClusterSpec:
        """Reads what `to_json` wrote; sizes may be texts with units.

        Raises:
            SpecError: an unknown or missing key, or a bad value.
        """
        if not isinstance(data, dict):
            raise SpecError("a cluster is described by a JSON object")
        gpu = data.get("gpu")
        if isinstance(gpu, str):
            gpu = asdict(gpu_named(gpu))
        if not isinstance(gpu, dict):
            raise SpecError("cluster.gpu must name a GPU or describe one")
        links = data.get("links")
        own = checked(cls, {**data, "gpu": None, "links": None, "nodes": None}, "cluster")
        own["gpu"] = GpuSpec(**checked(GpuSpec, gpu, "gpu"))
        own["links"] = None if links is None else Links.from_json(links, quantity)
        own["nodes"] = nodes_from_json(data.get("nodes"), own["gpu"])
        return cls(**own)

    @classmethod
    def load(cls, path: Path) -> ClusterSpec:
        """Reads a JSON file."""
        try:
            return cls.from_json(read_json(path))
        except SpecError as error:
            raise SpecError(f"{path.name}: {error}") from error
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise SpecError(f"{path.name} is no JSON: {error}") from error


_KINDS = {
    "a100-40g": ("A100-40GB", 8, 300e9, 100e9, "a100-80g"),
    "a100-80g": ("A100-80GB", 8, 300e9, 100e9, "a100-80g"),
    "h100-80g": ("H100-80GB", 8, 450e9, 400e9, "h100-80g"),
    "h200-141g": ("H200-141GB", 8, 450e9, 400e9, "h200-141g"),
    "b200-180g": ("B200-180GB", 8, 900e9, 400e9, "h100-80g"),
    "mi210-64g": ("MI210-64GB", 8, 100e9, 25e9, "mi210-64g"),
    "mi250-128g": ("MI250-128GB", 4, 100e9, 100e9, "mi210-64g"),
    "cpu": ("CPU-rank", 2, 2e9, 2e9, "cpu"),
}


def of_gpu(gpu: str, *, nodes: int, gpus_per_node: int) -> ClusterSpec:
    """Nodes of a GPU of the list, with that kind's usual links.

    Raises:
        SpecError: it is not in the list.
    """
    spec = gpu_named(gpu)
    kind = next(kind for kind, (name, *_) in _KINDS.items() if name == spec.name)
    return replace(preset(f"{kind}:1"), num_nodes=nodes, gpus_per_node=gpus_per_node)


def preset(text: str) -> ClusterSpec:
    """A cluster such as `h100-80g:1024`: kind and number of GPUs.

    Raises:
        SpecError: an unknown kind, or a number that does not fill nodes.
    """
    kind, _, number = text.partition(":")
    if kind not in _KINDS:
        raise SpecError(
            f"--cluster {text}: unknown kind; known: {', '.join(_KINDS)} as KIND:GPUS, or give a "
            "JSON file"
        )
    if not number.isdigit() or not int(number):
        raise SpecError(f"--cluster {text}: give the number of GPUs as {kind}:8")
    gpu, per_node, intra, nic, constants = _KINDS[kind]
    spec = ClusterSpec(
        gpu=GPUS[gpu],
        num_nodes=1,
        gpus_per_node=per_node,
        intra_bytes_per_s=intra,
        nic_bytes_per_s=nic,
        constants=constants,
    )
    return spec.resize(int(number))


def here() -> ClusterSpec:
    """This machine: its GPUs as `nvidia-smi` lists them, else one CPU rank per core.

    Raises:
        SpecError: GPUs that no preset describes.
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        gpus = [line.rsplit(",", 1) for line in listed.stdout.splitlines() if line.strip()]
    except (OSError, subprocess.SubprocessError):
        gpus = []
    if not gpus:
        cores = os.cpu_count() or 1
        return replace(preset("cpu:1"), gpus_per_node=cores)
    name, memory_mib = gpus[0][0].strip(), float(gpus[0][1])
    return replace(preset(f"{kind_of(name, memory_mib)}:1"), gpus_per_node=len(gpus))


def kind_of(name: str, memory_mib: float) -> str:
    """The preset kind of a GPU as its driver calls it.

    Raises:
        SpecError: none describes it.
    """
    for kind, (gpu, *_) in _KINDS.items():
        model = gpu.split("-")[0]
        nominal = GPUS[gpu].memory_bytes / 2**20
        if model in name and 0.85 < memory_mib / nominal < 1.15:
            return kind
    raise SpecError(
        f"--cluster here: no preset describes {name} with {memory_mib:.0f} MiB; describe it in a "
        "JSON file"
    )
