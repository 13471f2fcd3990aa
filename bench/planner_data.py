"""Published step times as rows of the cost model."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"
_A100 = {
    "peak_flops": 312e12,
    "hbm_bytes_per_s": 2.039e12,
    "num_sms": 108,
    "gpus_per_node": 8,
    "intra_bytes_per_s": 300e9,
    "nic_bytes_per_s": 100e9,
}
_H100 = {
    "peak_flops": 989e12,
    "hbm_bytes_per_s": 3.35e12,
    "num_sms": 132,
    "gpus_per_node": 8,
    "intra_bytes_per_s": 450e9,
    "nic_bytes_per_s": 400e9,
}
_GPT = {
    "mlp_matrices": 2,
    "tied": True,
    "has_bias": True,
    "norm_vectors": 2,
    "element_bytes": 2,
    "dropout": True,
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A table of measured step times."""

    name: str
    """Of the data set."""
    rows: Any
    """What was run."""
    seconds: Any
    """[n] seconds of a step."""

    @property
    def models(self) -> Any:
        """[n] one number per model."""
        return self.rows.hidden_size * 1000 + self.rows.num_layers

    def take(self, at: Any) -> Measured:
        """Some of the rows."""
        return Measured(name=self.name, rows=self.rows.take(at), seconds=self.seconds[at])


def _read(file: str) -> tuple[list[dict[str, str]], Any]:
    with (DATA / file).open(encoding="utf-8-sig", newline="") as lines:
        records = list(csv.DictReader(lines))

    def column(name: str, default: float | None = None) -> Any:
        return np.array(
            [float(r[name] or "nan") if default is None or r[name] else default for r in records]
        )

    return records, column


def _vocabulary(size: int, tp: Any) -> Any:
    return np.ceil(size / (128 * tp)) * 128 * tp


def vtrain(kind: str) -> Measured:
    """vTrain's ground truth, `multi` or `single` (arXiv 2312.12391)."""
    from copus_ext.cost_model.rows import RECOMPUTE_FULL, Rows

    _, column = _read(f"vtrain_ground_truth_{kind}_a100.csv")
    tp, heads = column("tensor parallelism"), column("attention heads")
    mbs, dp = column("micro batch"), column("data parallelism")
    rows = Rows(
        **_A100,
        **_GPT,
        **_shape(column("# layers"), column("hidden size"), heads, 4 * column("hidden size")),
        padded_vocab_size=_vocabulary(50257, tp),
        seq_length=column("sequence length"),
        fused_attention=False,
        learned_positions=column("sequence length"),
        gradient_bytes=2,
        tp=tp,
        pp=column("pipeline parallelism"),
        vpp=1,
        dp=dp,
        micro_batch_size=mbs,
        num_microbatches=column("global batch") / mbs / dp,
        recompute=RECOMPUTE_FULL,
        sequence_parallel=False,
        use_distributed_optimizer=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
    )
    return Measured(
        name=f"vtrain {kind}", rows=rows.full(), seconds=column("iteration time (ms)") / 1e3
    )


def korthikanti() -> Measured:
    """Table 5 of arXiv 2205.05198."""
    from copus_ext.cost_model.rows import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, Rows

    records, column = _read("korthikanti2022_table5_a100.csv")
    heads, mbs, dp = column("heads"), column("micro_batch"), column("dp")
    full = np.array([r["recompute"] == "full" for r in records])
    rows = Rows(
        **_A100,
        **_GPT,
        **_layout(column),
        **_shape(column("n_layers"), column("hidden"), heads, column("ffn")),
        padded_vocab_size=_vocabulary(51200, column("tp")),
        seq_length=column("seq_len"),
        fused_attention=False,
        learned_positions=column("seq_len"),
        gradient_bytes=4,
        micro_batch_size=mbs,
        num_microbatches=column("global_batch") / mbs / dp,
        recompute=np.where(full, RECOMPUTE_FULL, RECOMPUTE_SELECTIVE),
        sequence_parallel=np.array([r["seq_parallel"] == "True" for r in records]),
    )
    return Measured(name="korthikanti", rows=rows.full(), seconds=column("iter_time_s"))


def narayanan() -> Measured:
    """Table 1 of arXiv 2104.04473; seconds derived from its throughput, which nobody checked."""
    from copus_ext.cost_model.rows import RECOMPUTE_FULL, Rows

    _, column = _read("narayanan2021_table1_a100.csv")
    heads, mbs, dp = column("heads"), column("micro_batch"), column("dp")
    rows = Rows(
        **_A100,
        **_GPT,
        **_layout(column),
        **_shape(column("n_layers"), column("hidden"), heads, 4 * column("hidden")),
        padded_vocab_size=column("vocab"),
        seq_length=column("seq_len"),
        fused_attention=False,
        learned_positions=column("seq_len"),
        gradient_bytes=4,
        micro_batch_size=mbs,
        num_microbatches=column("global_batch") / mbs / dp,
        recompute=RECOMPUTE_FULL,
        sequence_parallel=False,
    )
    return Measured(
        name="narayanan", rows=rows.full(), seconds=column("iter_s_derived_from_unverified")
    )


def h100_weak_scaling() -> Measured:
    """Megatron-LM's table for H100; micro-batch 1 and no virtual stages are our assumptions."""
    from copus_ext.cost_model.rows import RECOMPUTE_NONE, Rows

    _, column = _read("megatron_h100_weak_scaling.csv")
    heads, dp = column("heads"), column("dp")
    rows = Rows(
        **_H100,
        **{**_GPT, "dropout": False, "tied": False},
        **_shape(column("n_layers"), column("hidden"), heads, 4 * column("hidden")),
        padded_vocab_size=column("vocab"),
        seq_length=column("seq_len"),
        fused_attention=True,
        learned_positions=0,
        gradient_bytes=4,
        tp=column("tp"),
        pp=column("pp"),
        vpp=1,
        dp=dp,
        micro_batch_size=1,
        num_microbatches=column("global_batch") / dp,
        recompute=RECOMPUTE_NONE,
        sequence_parallel=column("tp") > 1,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    return Measured(name="h100", rows=rows.full(), seconds=column("derived_iter_s"))


def _shape(layers: Any, hidden: Any, heads: Any, ffn: Any) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": heads,
        "kv_channels": hidden / heads,
    }


def _layout(column: Any) -> dict[str, Any]:
    return {
        "tp": column("tp"),
        "pp": column("pp"),
        "vpp": column("virtual_pp", 1.0),
        "dp": column("dp"),
        "use_distributed_optimizer": False,
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
    }
