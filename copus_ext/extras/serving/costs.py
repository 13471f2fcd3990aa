"""Seconds and bytes of layers in serving, from the cost model: predicted, never measured.

A matrix product takes the longer of its arithmetic and of reading its weights, which are stored at
their bits with one scale of 16 bits a group. Arithmetic, keys and values have 16 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from copus_ext.cost_model.cluster_spec import ClusterSpec, NodeSpec, of_gpu
from copus_ext.cost_model.constants import Constants
from copus_ext.cost_model.gpus import GPUS
from copus_ext.cost_model.kernels import gemm_s, moved_s
from copus_ext.cost_model.layer_time import attention_s
from copus_ext.cost_model.memory import FRAGMENTATION
from copus_ext.cost_model.model_spec import ModelSpec
from copus_ext.cost_model.rows import RECOMPUTE_NONE, ConfigBatch
from copus_ext.extras.serving.problem import Phase, ServingProblem, pipeline_objective

WHOLE = 16
"""Bits of weights that are not quantised."""
_KERNELS = 12
"""Of a layer as servers fuse it; assumed."""
_KERNEL_S = 5e-6
"""Least time of a kernel that a captured graph starts on a GPU."""
_TILE_ROWS = 16
"""Rows that a matrix product computes at least."""
_CPU_CONTEXT_BYTES, _CONTEXT_BYTES = 3e8, 1.2e9
_PAIR = 2.0
"""Bytes of a number of 16 bits."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is asked of a server at once: prompts of a batch, tokens of each and of its answer."""

    prompts: int
    prompt: int
    generate: int


@dataclass(frozen=True, kw_only=True)
class Device:
    """One place in the pipeline: a device of a node."""

    node: int
    spec: NodeSpec

    @property
    def name(self) -> str:
        return f"{self.spec.gpu.name} of node {self.node}"


def devices_of(cluster: ClusterSpec) -> list[Device]:
    """All devices in the order of the cluster's nodes, which is that of the pipeline."""
    nodes = cluster.nodes or (NodeSpec(gpu=cluster.gpu),) * cluster.num_nodes
    return [
        Device(node=i, spec=n) for i, n in enumerate(nodes) for _ in range(cluster.gpus_per_node)
    ]


class ServingCosts:
    """Prices a dense model on a cluster, whose devices are the stages.

    Weights may have some `bits`, ascending, and `group_size` of them share a scale. A share of each
    memory, `memory_margin`, is left free. The sample length of the model has no effect.
    """

    def __init__(
        self,
        model: ModelSpec,
        cluster: ClusterSpec,
        work: Workload,
        *,
        bits: tuple[int, ...],
        group_size: int,
        memory_margin: float = 0.04,
    ) -> None:
        self.model = replace(model, precision="bf16", gradient_bytes=4)
        self.cluster, self.work, self.bits = cluster, work, bits
        self.group_size, self.memory_margin = group_size, memory_margin
        self.devices = devices_of(cluster)

    @property
    def _products(self) -> list[tuple[int, int]]:
        """(inner, columns) of the matrix products of a layer."""
        m = self.model
        heads = m.num_attention_heads * m.channels
        keys_values = 2 * m.groups * m.channels
        up = m.ffn * (2 if m.gated else 1)
        return [
            (m.hidden_size, heads + keys_values),
            (heads, m.hidden_size),
            (m.hidden_size, up),
            (m.ffn, m.hidden_size),
        ]

    def weight_bytes(self, number: float, bits: int) -> float:
        """Bytes of weights of some bits, with their scales."""
        scales = 0.0 if bits == WHOLE else _PAIR / self.group_size
        return number * (bits / 8 + scales)

    @property
    def _vocabulary(self) -> int:
        return int(self.model.padded_vocab_size(1))

    def layer_bytes(self) -> Any:
        """[bits] of a layer: weights, and keys and values of all prompts at their full length."""
        m, work = self.model, self.work
        linear = float(sum(k * n for k, n in self._products))
        vectors = 1 if m.normalization == "RMSNorm" else 2
        rest = 2 * vectors * m.hidden_size + (sum(n for _, n in self._products) if m.bias else 0)
        tokens = work.prompts * (work.prompt + work.generate)
        cache = _PAIR * tokens * 2 * m.groups * m.channels
        return np.array([self.weight_bytes(linear, b) + _PAIR * rest + cache for b in self.bits])

    def end_bytes(self) -> tuple[float, float]:
        """Of the embedding, and of the final norm with the head. A tied head is a copy."""
        table = _PAIR * self._vocabulary * self.model.hidden_size
        positions = _PAIR * self.model.learned_positions * self.model.hidden_size
        return table + positions, table + _PAIR * 2 * self.model.hidden_size

    def workspace_bytes(self, prefill: int, decode: int) -> float:
        """What comes and goes while micro-batches of some sizes pass."""
        m = self.model
        widest = max(max(k, n) for k, n in self._products)
        tokens = max(prefill * self.work.prompt, decode)
        logits = (4.0 + _PAIR) * max(prefill, decode) * self._vocabulary
        return FRAGMENTATION * (_PAIR * tokens * (3 * m.hidden_size + 2 * widest) + logits)

    def capacity_bytes(self, prefill: int, decode: int) -> Any:
        """[devices] bytes for layers, embedding and head."""
        context = _CPU_CONTEXT_BYTES if self.cluster.is_gloo else _CONTEXT_BYTES
        taken = context + self.workspace_bytes(prefill, decode)
        free = [(1 - self.memory_margin) * d.spec.gpu.memory_bytes - taken for d in self.devices]
        return np.maximum(free, 0.0)

    def problem(
        self,
        loss_increase: Any,
        *,
        prefill: int,
        decode: int,
        theta: float,
        max_loss_increase: float | None,
    ) -> ServingProblem:
        """The problem of micro-batches of so many prompts, with increases of [layers, bits]."""
        first, last = self.end_bytes()
        return ServingProblem(
            bits=self.bits,
            loss_increase=np.asarray(loss_increase, dtype=float),
            prefill=self._phase(prefill * self.work.prompt, prefill, is_prefill=True),
            decode=self._phase(decode, decode, is_prefill=False),
            layer_bytes=self.layer_bytes(),
            first_bytes=first,
            last_bytes=last,
            capacity_bytes=self.capacity_bytes(prefill, decode),
            objective=pipeline_objective(
                prompts=self.work.prompts,
                prefill=prefill,
                decode=decode,
                tokens=self.work.generate,
                theta=theta,
            ),
            max_loss_increase=max_loss_increase,
        )

    def _phase(self, tokens: int, prompts: int, *, is_prefill: bool) -> Phase:
        """Seconds of a micro-batch of so many tokens of so many prompts."""
        m, layers, ends = self.model, [], []
        for device in self.devices:
            rows, c = self._rows(device, prompts), self._constants(device)
            moved = 28.0 * tokens * m.hidden_size + 2.0 * tokens * m.ffn * (3 if m.gated else 2)
            attention = attention_s(rows, c) if is_prefill else self._attention_s(rows, c, prompts)
            other = float(attention) + float(moved_s(rows, c, moved))
            of_bits = [
                sum(self._product_s(rows, c, tokens, n, k, b) for k, n in self._products)
                for b in self.bits
            ]
            layers.append([self._joined(seconds + other, c) for seconds in of_bits])
            head = self._product_s(rows, c, prompts, self._vocabulary, m.hidden_size, WHOLE)
            ends.append((float(moved_s(rows, c, 6.0 * tokens * m.hidden_size)), head))
        speed = np.array([d.spec.speed for d in self.devices])
        first, last = np.array(ends).T
        return Phase(
            layer_s=np.array(layers) / speed[:, None],
            first_s=first / speed,
            last_s=last / speed,
            p2p_time_s=self._p2p_time_s(_PAIR * tokens * m.hidden_size),
        )

    def _product_s(
        self, rows: ConfigBatch, c: Constants, m: int, n: int, k: int, bits: int
    ) -> float:
        read = float(moved_s(rows, c, self.weight_bytes(float(n * k), bits)))
        return max(float(gemm_s(rows, c, max(m, _TILE_ROWS), n, k)), read)

    def _attention_s(self, rows: ConfigBatch, c: Constants, prompts: int) -> float:
        """One token of each prompt on all before it, at the middle of what is generated."""
        m = self.model
        keys = prompts * (self.work.prompt + self.work.generate / 2)
        flops = 4.0 * keys * m.num_attention_heads * m.channels
        read = float(moved_s(rows, c, _PAIR * keys * 2 * m.groups * m.channels))
        return max(flops / (float(rows.peak_flops) * c.attention_efficiency), read)

    def _joined(self, work: float, c: Constants) -> float:
        """A layer cannot beat the time that its kernels take to start."""
        each = c.launch_s if self.cluster.is_gloo else min(c.launch_s, _KERNEL_S)
        q = c.launch_sharpness
        return (work**q + (_KERNELS * each) ** q) ** (1 / q)

    def _p2p_time_s(self, num_bytes: float) -> Any:
        """[devices] seconds of a message to the next device; of the last one 0."""
        cluster, found = self.cluster, []
        c = cluster.load_constants()
        for here, after in zip(self.devices, self.devices[1:]):
            speed, latency = min(c.dp_bytes_per_s, cluster.intra_bytes_per_s), 0.0
            if here.node != after.node:
                speed = cluster.network_bytes_per_s(c)
                if cluster.links is not None:
                    speed = cluster.links.bytes_per_s[here.node][after.node]
                    latency = cluster.links.latency_s[here.node][after.node]
            found.append(c.exchange_s + latency + num_bytes / speed)
        return np.array([*found, 0.0])

    def _rows(self, device: Device, prompts: int) -> ConfigBatch:
        """The device and a prefill micro-batch, as the cost model takes them."""
        alone = replace(self.cluster, gpu=device.spec.gpu, links=None, nodes=())
        return ConfigBatch(
            **self.model.with_seq_length(self.work.prompt).batch_fields(1),
            **alone.batch_fields("bf16"),
            **dict.fromkeys(("tp", "pp", "vpp", "dp", "num_microbatches"), 1),
            **dict.fromkeys(("use_distributed_optimizer", "overlap_grad_reduce"), False),
            **dict.fromkeys(("overlap_param_gather", "sequence_parallel"), False),
            micro_batch_size=prompts,
            recompute=RECOMPUTE_NONE,
        )

    def _constants(self, device: Device) -> Constants:
        """Of a device's kind; those of the cluster where none were fitted on it."""
        name, gpu = device.spec.constants, device.spec.gpu.name
        if name is None and gpu != self.cluster.gpu.name and gpu in GPUS:
            name = of_gpu(gpu, nodes=1, gpus_per_node=1).constants
        kind = self.cluster if name is None else replace(self.cluster, constants=name)
        return kind.load_constants()


def micro_batches(prompts: int) -> list[int]:
    """Sizes to try: powers of two, and all prompts at once."""
    return sorted({2**i for i in range(int(math.log2(prompts)) + 1)} | {prompts})
