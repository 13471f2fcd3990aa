"""The machine: nodes and links; by preset, from a JSON file, or given number by number."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.gpus import GPUS, KINDS, GpuSpec, gpu_named, kind_of, kinds_named
from copus_ext.cost_model.spec_file import SpecError, checked, is_positive, quantity, read_json
from megatron.trainer.common.program import unknown

_NODE_KEYS = ("count", "gpu", "speed", "memory_bytes", "constants")
_MAX_NODES = 1 << 20
_EXAMPLE = (
    '{"gpu": "H100-80GB", "num_nodes": 2, "gpus_per_node": 8, "intra_bytes_per_s": "450GB/s", '
    '"nic_bytes_per_s": "400GB/s"}'
)
"""The least that a file has to say."""


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One node; all of its GPUs are alike."""

    gpu: GpuSpec
    speed: float = 1.0
    """Work per second over what such a GPU usually does."""
    constants: str | None = None
    """Name of the fitted constants of its kind; None: those of the cluster."""

    def __post_init__(self) -> None:
        if not is_positive(self.speed) or not 1e-3 <= self.speed <= 1e3:
            raise SpecError(f"nodes.speed {str(self.speed)[:60]!r} must be from 0.001 to 1000")


def nodes_from_json(data: Any, usual: GpuSpec) -> tuple[NodeSpec, ...]:
    """Reads the `nodes` of a cluster file.

    Args:
        data: a list of objects, each for `count` (1) nodes one after the other: `gpu`, a name or a
            description, `speed`, `memory_bytes`, `constants`; what is left out is as usual.

    Raises:
        SpecError: an unknown key or a bad value.
    """
    if data is None:
        return ()
    if not isinstance(data, list) or not all(isinstance(one, dict) for one in data):
        raise SpecError('cluster.nodes must be a list of objects such as {"count": 2, "speed": 1}')
    found: list[NodeSpec] = []
    for one in data:
        if unknown := sorted(set(one) - set(_NODE_KEYS)):
            raise SpecError(
                f"unknown nodes keys: {', '.join(unknown)}; known: {', '.join(_NODE_KEYS)}"
            )
        count = one.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MAX_NODES:
            raise SpecError(f"nodes.count {str(count)[:60]} must be a whole number from 1")
        if len(found) + count > _MAX_NODES:
            raise SpecError(f"nodes describes more than {_MAX_NODES} nodes")
        found += [_node(one, usual)] * count
    return tuple(found)


def _node(one: dict[str, Any], usual: GpuSpec) -> NodeSpec:
    gpu = one.get("gpu")
    if gpu is None:
        spec = usual
    elif isinstance(gpu, str):
        spec = gpu_named(gpu, "nodes.gpu")
    elif isinstance(gpu, dict):
        spec = GpuSpec(**checked(GpuSpec, gpu, "nodes.gpu"))
    else:
        raise SpecError("nodes.gpu must name a GPU or describe one")
    memory = one.get("memory_bytes")
    if memory is not None:
        spec = replace(spec, memory_bytes=quantity(memory) if isinstance(memory, str) else memory)
    constants = one.get("constants")
    if constants is not None and not isinstance(constants, str):
        raise SpecError(f"nodes.constants {str(constants)[:60]} must be a name")
    return NodeSpec(gpu=spec, speed=one.get("speed", 1.0), constants=constants)


def nodes_to_json(nodes: Sequence[NodeSpec]) -> list[dict[str, Any]]:
    """What `nodes_from_json` reads."""
    told = []
    for node, same in itertools.groupby(nodes):
        record = {"count": len(list(same)), "gpu": asdict(node.gpu), "speed": node.speed}
        told.append(record | ({"constants": node.constants} if node.constants else {}))
    return told


_LINK_KEYS = ("bytes_per_s", "latency_s", "hosts", "duplex")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_RANGES = {"bytes_per_s": (1, 1e18, "bytes/s"), "latency_s": (0, 1e6, "seconds")}
_SHOWN = 60

Matrix = tuple[tuple[float, ...], ...]
"""`[nodes][nodes]`, from the node of the row to that of the column; the diagonal is 0."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What was measured between all pairs of nodes; need not be symmetric."""

    bytes_per_s: Matrix
    """Bandwidth from node to node while nothing else is sent; the diagonal says nothing."""
    latency_s: Matrix
    """Time of an empty message from node to node; the diagonal says nothing."""
    hosts: tuple[str, ...] = ()
    """Names of the nodes in the order of rows and columns; none: they have only numbers."""
    duplex: float = 1.0
    """Share of a bandwidth that is left while as much is sent the other way. A step sends both ways
    at once nearly always: in rings, and between the stages of a pipeline."""

    def __post_init__(self) -> None:
        if not (is_positive(self.duplex) and self.duplex <= 1):
            raise SpecError(f"links.duplex {_short(self.duplex)} must be above 0 and at most 1")
        num = len(self.bytes_per_s)
        for name in ("bytes_per_s", "latency_s"):
            matrix = getattr(self, name)
            if len(matrix) != num:
                raise SpecError(
                    f"links.{name} has {len(matrix)} rows and links.bytes_per_s {num}; give both "
                    "one row and one column per node"
                )
            for i, row in enumerate(matrix):
                if len(row) != num:
                    raise SpecError(
                        f"links.{name} row {i} has {len(row)} values and there are {num} rows; "
                        "give one row and one column per node"
                    )
                for j, value in enumerate(row):
                    _check(f"links.{name}[{i}][{j}]", value, own=i == j, kind=name)
        if self.hosts:
            self._check_hosts(num)

    def _check_hosts(self, num: int) -> None:
        if len(self.hosts) != num:
            raise SpecError(
                f"links.hosts has {len(self.hosts)} names for {num} nodes; name every node once"
            )
        for host in self.hosts:
            if not isinstance(host, str) or not _HOST.fullmatch(host):
                raise SpecError(
                    f"links.hosts {_short(host)} is not a host name; use letters, digits, '-', '.'"
                )
            if self.hosts.count(host) > 1:
                raise SpecError(f"links.hosts names {host} twice; name every node once")

    def both_ways(self) -> Links:
        """The same with the bandwidths that are left while the other directions are used."""
        if self.duplex == 1:
            return self
        speeds = tuple(tuple(self.duplex * x for x in row) for row in self.bytes_per_s)
        return replace(self, bytes_per_s=speeds, duplex=1.0)

    @property
    def num_nodes(self) -> int:
        return len(self.bytes_per_s)

    def name(self, node: int) -> str:
        """What to call a node: its host name, or its number."""
        return self.hosts[node] if self.hosts else str(node)

    def to_json(self) -> dict[str, Any]:
        data = {n: [list(row) for row in getattr(self, n)] for n in ("bytes_per_s", "latency_s")}
        more = {"hosts": list(self.hosts)} if self.hosts else {}
        return {**data, **more, **({"duplex": self.duplex} if self.duplex != 1 else {})}

    @classmethod
    def from_json(cls, data: Any) -> Links:
        """Reads what `to_json` wrote.

        Args:
            data: `bytes_per_s` a matrix of numbers or texts such as `10GB/s`; `latency_s` a matrix,
                one number for all pairs, or left out; `hosts` may be left out; anything may stand
                on the diagonals, also null.

        Raises:
            SpecError: an unknown key or a bad value.
        """
        if not isinstance(data, dict):
            raise SpecError('cluster.links must be an object with "bytes_per_s" and "latency_s"')
        if unknown := sorted(set(data) - set(_LINK_KEYS)):
            raise SpecError(
                f"unknown links keys: {', '.join(unknown)}; known: {', '.join(_LINK_KEYS)}"
            )
        if "bytes_per_s" not in data:
            raise SpecError("links lacks bytes_per_s; give one row and one column per node")
        speeds = _matrix("bytes_per_s", data["bytes_per_s"])
        latency = data.get("latency_s", 0.0)
        if not isinstance(latency, list):
            num = len(speeds)
            latency = [[latency if i != j else 0.0 for j in range(num)] for i in range(num)]
        hosts = data.get("hosts", [])
        if not isinstance(hosts, list):
            raise SpecError(f"links.hosts {_short(hosts)} must be a list of host names")
        latencies = _matrix("latency_s", latency)
        duplex = data.get("duplex", 1.0)
        return cls(bytes_per_s=speeds, latency_s=latencies, hosts=tuple(hosts), duplex=duplex)


def _matrix(name: str, rows: Any) -> Matrix:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise SpecError(f"links.{name} {_short(rows)} must be a list of rows, one per node")

    def number(i: int, j: int, value: Any) -> Any:
        if i == j:
            return 0.0
        is_text = isinstance(value, str) and name == "bytes_per_s"
        return quantity(value) if is_text else value

    return tuple(
        tuple(number(i, j, value) for j, value in enumerate(row)) for i, row in enumerate(rows)
    )


def _check(what: str, value: Any, *, own: bool, kind: str) -> None:
    least, most, unit = _RANGES[kind]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if own and not (is_number and value == 0):
        raise SpecError(f"{what} is {_short(value)}; it must be 0: no node has a link to itself")
    # Comparisons, as a whole number may be too large for a float.
    if not own and not (is_number and least <= value <= most):
        raise SpecError(f"{what} is {_short(value)}; use {least:g} to {most:g} {unit}")


def _short(value: Any) -> str:
    return repr(str(value)[:_SHOWN]) if isinstance(value, str) else str(value)[:_SHOWN]


_CONSTANTS = Path(__file__).parent / "data"
_MAX_GPUS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Nodes of as many GPUs each; equal ones, unless `nodes` or `links` say otherwise."""

    gpu: GpuSpec
    num_nodes: int
    gpus_per_node: int
    intra_bytes_per_s: float
    """Link of a GPU to the others of its node, one direction."""
    nic_bytes_per_s: float
    """Network of a whole node, one direction."""
    nic_is_measured: bool = False
    """Whether `nic_bytes_per_s` was measured, and not taken from a data sheet, of which messages
    reach a share."""
    constants: str = "a100-80g"
    """Name of the fitted constants (`copus_ext/cost_model/data/NAME.json`)."""
    links: Links | None = None
    """What every pair of nodes was measured to have; None: all pairs have `nic_bytes_per_s`."""
    nodes: tuple[NodeSpec, ...] = ()
    """What every node is; none: all are of `gpu`."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "gpus_per_node"):
            value = getattr(self, name)
            if not (isinstance(value, int) and is_positive(value) and value <= _MAX_GPUS):
                raise SpecError(f"cluster.{name} {str(value)[:60]} must be a whole number from 1")
        if self.world_size > _MAX_GPUS:
            raise SpecError(f"a cluster of {self.world_size} GPUs is more than {_MAX_GPUS}")
        for name in ("intra_bytes_per_s", "nic_bytes_per_s"):
            if not is_positive(value := getattr(self, name)):
                raise SpecError(f"cluster.{name} {str(value)[:60]!r} must be positive")
        if not isinstance(self.nic_is_measured, bool):
            raise SpecError("cluster.nic_is_measured must be true or false")
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
        return self.num_nodes * self.gpus_per_node

    def network_bytes_per_s(self, c: Constants) -> float:
        """What messages reach of the network of a node."""
        if self.links is not None:
            return self.links.duplex * self.nic_bytes_per_s
        return self.nic_bytes_per_s * (1.0 if self.nic_is_measured else c.nic_efficiency)

    def batch_fields(self, precision: str) -> dict[str, Any]:
        """The machine's fields of `ConfigBatch`."""
        return {
            "peak_flops": self.gpu.peak(precision),
            "hbm_bytes_per_s": self.gpu.hbm_bytes_per_s,
            "num_sms": self.gpu.num_sms,
            "gpus_per_node": self.gpus_per_node,
            "intra_bytes_per_s": self.intra_bytes_per_s,
            "intra_share": self.intra_share,
            "nic_bytes_per_s": self.nic_bytes_per_s * (self.links.duplex if self.links else 1.0),
            "nic_is_measured": self.nic_is_measured or self.links is not None,
            "on_cpu": self.is_gloo,
        }

    @property
    def intra_share(self) -> float:
        """Link within a node over that of the machine whose constants are used: collectives reach
        that share of what they reached there."""
        return self.intra_bytes_per_s / _FITTED_ON.get(self.constants, self.intra_bytes_per_s)

    @property
    def is_gloo(self) -> bool:
        """Whether its ranks are CPU ranks, which talk over gloo."""
        return self.constants == "cpu"

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
            gpu = asdict(gpu_named(gpu, "gpu"))
        if not isinstance(gpu, dict):
            raise SpecError(f"cluster.gpu must name a GPU or describe one, as in {_EXAMPLE}")
        if "num_nodes" not in data and isinstance(data.get("nodes"), int):
            raise SpecError("cluster.nodes lists nodes that differ; did you mean num_nodes?")
        links = data.get("links")
        own = checked(cls, {**data, "gpu": None, "links": None, "nodes": None}, "cluster", _EXAMPLE)
        own["gpu"] = GpuSpec(**checked(GpuSpec, gpu, "gpu"))
        own["links"] = None if links is None else Links.from_json(links)
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
            raise SpecError(f"{path.name}: not valid JSON: {error}; correct it there") from error


_FITTED_ON = {
    constants: intra
    for kind, (_, _, intra, _, constants) in KINDS.items()
    if constants == kind and kind.startswith(("a100", "h100", "h200"))
}
"""Links within a node of those whose constants these are. Of CPUs and the MI210 none is known."""


def of_gpu(gpu: str, *, nodes: int, gpus_per_node: int) -> ClusterSpec:
    """Nodes of a GPU of the list, with that kind's usual links.

    Raises:
        SpecError: it is not in the list.
    """
    spec = gpu_named(gpu)
    kind = next(kind for kind, (name, *_) in KINDS.items() if name == spec.name)
    return replace(preset(f"{kind}:1"), num_nodes=nodes, gpus_per_node=gpus_per_node)


def preset(text: str) -> ClusterSpec:
    """A cluster such as `h100-80g:1024`: kind and number of GPUs.

    Raises:
        SpecError: an unknown kind, one of several, or a number that does not fill nodes.
    """
    name, colon, number = text.partition(":")
    kinds = kinds_named(name)
    if len(kinds) > 1:
        names = " or ".join(f"{kind}{colon}{number}" for kind in kinds)
        raise SpecError(f"--cluster {text}: write {names}")
    if not kinds:
        more = "as KIND:GPUS, or a JSON file"
        raise SpecError(f"--cluster {text}: {unknown(name, list(KINDS))} {more}")
    kind = kinds[0]
    if not number.isdigit() or not int(number):
        raise SpecError(f"--cluster {text}: give the number of GPUs as {kind}:8")
    gpu, per_node, intra, nic, constants = KINDS[kind]
    per_node = per_node or int(number)
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
