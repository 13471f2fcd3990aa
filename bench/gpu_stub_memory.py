"""Is the predicted peak of memory right for layers of plain torch on a GPU?

    python -m bench.gpu_stub_memory [--only PATTERN] [--again]

Needs `bash tests/gpu_stub/setup.sh`, and no GPU: torch's own allocator counts on a stub of CUDA
(`bench/stub_peak.py`). Each point is one rank of one layout. A third of the points were not looked
at when the rows of `cost_model/memory.py` were written; two terms of stages without logits (GELU's
derivative, the gradient of the embedding) came later, when errors of all points were known. No
number was fitted to them. `--again` only predicts anew, of points that the results file has. Writes
docs/results/gpu_stub_memory.json.

Errors are against what the allocator reserves with room to spare, with segments that grow, as the
trainer has them. Out of memory is where a step does not end: the allocator's limit was lowered by
1 % at a time. Recall and false alarms are those of the predicted mean, for limits some percent
below and above the lowest; the planner asks for more room, by its doubt.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.stub_peak import VOCAB_SIZE
from bench.support import ROOT, arguments, origin, write

COMMON = """--mock-data --tokenizer-type NullTokenizer --vocab-size 50175 --lr 1e-3 --bf16
--train-iters 3 --transformer-impl local --use-distributed-optimizer"""
GPT = """--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024
--max-position-embeddings 1024"""
NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_MODERN = f"""--swiglu --normalization RMSNorm --position-embedding-type rope
--disable-bias-linear --untie-embeddings-and-output-weights {NO_DROPOUT}"""
LLAMA = f"""--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --group-query-attention
--num-query-groups 4 --ffn-hidden-size 5632 --seq-length 2048 --max-position-embeddings 2048
{_MODERN}"""
LONG = f"""--num-layers 6 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 2816
--seq-length 4096 --max-position-embeddings 4096 {_MODERN}"""
EXPERTS = f"""{LONG} --num-layers 4 --seq-length 2048 --num-experts 8 --moe-router-topk 2
--moe-ffn-hidden-size 1408 --moe-token-dispatcher-type alltoall
--moe-router-load-balancing-type none"""
MODELS = {
    "gpt": GPT,
    "gpt without dropout": f"{GPT} {NO_DROPOUT}",
    "llama": LLAMA,
    "long": LONG,
    "experts": EXPERTS,
}
_FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "vpp": "--num-virtual-stages-per-pipeline-rank",
}
_WORDS = {
    "sp": "--sequence-parallel",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "selective": "--recompute-granularity selective",
}
_FEW = ["", "tp2", "tp2 sp", "tp4 sp", "dp4", "full", "selective", "pp2"]
_GRID = {
    ("gpt", 4): [*_FEW, "tp2 full"],
    ("gpt", 1): [""],
    ("gpt", 2): ["", "pp4"],
    ("gpt", 8): ["", "tp4 sp"],
    ("gpt without dropout", 4): ["", "tp2 sp", "pp2"],
    ("gpt without dropout", 8): [""],
    ("llama", 1): ["", "pp4", "tp2", "cp2", "pp2 vpp2", "full"],
    ("llama", 2): [*_FEW, "tp2 sp pp2", "cp2 tp2 sp"],
    ("llama", 4): ["", "tp4 sp"],
    ("long", 1): ["", "tp2 sp", "cp2", "cp4", "full", "pp2"],
    ("long", 2): ["", "tp4 sp", "cp4"],
    ("experts", 1): ["", "ep2", "ep4", "ep2 full", "pp2 ep2", "tp2 sp ep2 etp1"],
    ("experts", 2): ["ep2", "ep4", "tp2 sp ep4 etp1"],
}
"""(model, micro-batch) -> layouts."""
WORKSPACES = 75e6
"""Bytes of libraries in torch's allocator: 67 to 120 MB were seen."""
_SIZES = (0.8, 0.9, 0.95, 1.05, 1.1, 1.25)
"""Of a GPU, over the least in which a step of the point ends."""


@dataclass(frozen=True, kw_only=True)
class Point:
    model: str
    micro_batch_size: int
    layout: str
    world: int
    stage: int
    stages: int
    is_held_out: bool

    @property
    def name(self) -> str:
        """Of the point, for one line."""
        where = f" stage {self.stage}" if self.stages > 1 else ""
        return f"{self.model}, {self.micro_batch_size} {self.layout or 'alone'}{where}"

    @property
    def rank(self) -> int:
        """The first rank of the stage."""
        return self.world // self.stages * self.stage

    def flags(self) -> list[str]:
        """Of `pretrain_gpt.py`."""
        sizes = dict(re.findall(r"(\w+?)(\d+)", self.layout))
        replicas = int(sizes.get("dp", 0)) or self.world // (
            self.stages * int(sizes.get("tp", 1)) * int(sizes.get("cp", 1))
        )
        # Two micro-batches for each stage, so that the pipeline is full.
        batch = self.micro_batch_size * replicas * max(2 * self.stages, 2)
        found = f"{COMMON} {MODELS[self.model]} --micro-batch-size {self.micro_batch_size}"
        found += f" --global-batch-size {batch}"
        for word in self.layout.split():
            name = re.sub(r"\d", "", word)
            if word in _WORDS:
                found += f" {_WORDS[word]}"
            elif name != "dp":
                found += f" {_FLAGS[name]} {word.removeprefix(name)}"
        return found.split()


def points() -> Iterator[Point]:
    """All points; every third is held out."""
    number = itertools.count()
    for (model, micro), layouts in _GRID.items():
        for layout in layouts:
            sizes = {n: int(size) for n, size in re.findall(r"(\w+?)(\d+)", layout)}
            dense = sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1)
            experts = sizes.get("ep", 1) * sizes.get("etp", sizes.get("tp", 1))
            stages = sizes.get("pp", 1)
            for stage in range(stages):
                yield Point(
                    model=model,
                    micro_batch_size=micro,
                    layout=layout,
                    world=stages * max(dense, experts),
                    stage=stage,
                    stages=stages,
                    is_held_out=next(number) % 3 == 2,
                )


def measured(point: Point) -> dict[str, int]:
    """Bytes that the allocator saw on the rank."""
    program = [ROOT / "tests/gpu_stub/on_stub.py", ROOT / "bench/stub_peak.py"]
    command = [sys.executable, *program, point.world, point.rank, *point.flags()]
    # Only a choice of experts depends on numbers.
    env = {**os.environ, "STUB_KERNELS": "small" if point.model == "experts" else "none"}
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        list(map(str, command)), env=env, capture_output=True, text=True, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("PEAK ")]
    if not lines:
        raise RuntimeError(f"{point.name}: {done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("PEAK "))


def predicted(point: Point) -> dict[str, float]:
    """Bytes by kind of the rank's stage. Of the context the stub has the workspaces alone."""
    from copus_ext.controller.throughput_table import configuration_of_run, model_of
    from copus_ext.cost_model.cluster_spec import preset
    from copus_ext.cost_model.memory import memory
    from copus_ext.planner.space import points_of, to_config_batch
    from megatron.trainer.config.arguments import parse_args, resolve

    config = resolve(parse_args(point.flags()), point.world, cuda_available=True)
    config = config.replace(padded_vocab_size=VOCAB_SIZE)
    own = configuration_of_run(config, point.micro_batch_size, config.batch.global_batch_size)
    cluster = preset(f"h100-80g:{point.world}")
    rows = to_config_batch(model_of(config), cluster, points_of([own]))
    if rows.experts is not None:
        rows = rows.change(experts=dataclasses.replace(rows.experts, load=1.0))
    stages = memory(rows, context_bytes=WORKSPACES).stages
    return {kind: float(values[point.stage, 0]) for kind, values in stages.items()}


def row_of(point: Point, seen: dict[str, int]) -> dict[str, Any]:
    """Of the results: errors of the total against what is reserved, and of what moves against what
    is allocated."""
    parts = predicted(point)
    total = sum(parts.values())
    moving = parts["activations"] + parts["logits"] + parts["buffers"]
    return {
        "name": point.name,
        "flags": " ".join(point.flags()),
        "world_size": point.world,
        "rank": point.rank,
        "held_out": point.is_held_out,
        **{f"{kind}_bytes": size for kind, size in seen.items()},
        "predicted_bytes": round(total),
        "predicted_parts": {kind: round(size) for kind, size in parts.items()},
        "error": total / seen["reserved"] - 1,
        "error_of_moving": moving / (seen["peak"] - seen["held"]) - 1,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(row["error"]) for row in rows]
    caught, full, alarms, fits = 0, 0, 0, 0
    for row, size in itertools.product(rows, _SIZES):
        is_alarm = row["predicted_bytes"] > size * row["needed_bytes"]
        full, fits = full + (size < 1), fits + (size > 1)
        caught, alarms = caught + (is_alarm and size < 1), alarms + (is_alarm and size > 1)
    return {
        "points": len(rows),
        "mean_error": sum(errors) / len(errors),
        "worst_error": max(errors),
        "mean_error_of_moving": sum(abs(r["error_of_moving"]) for r in rows) / len(rows),
        "recall": caught / full,
        "false_alarms": alarms / fits,
    }


def main() -> None:
    parser = arguments(__doc__, "gpu_stub_memory.json")
    parser.add_argument("--only", default="", help="pattern of names")
    parser.add_argument("--again", action="store_true", help="measure nothing that is known")
    args = parser.parse_args()
    known = _known(args.output) if args.again else {}
    rows = []
    for point in points():
        if not re.search(args.only, point.name):
            continue
        row = row_of(point, known.get(point.name) or measured(point))
        rows.append(row)
        print(
            f"{row['name']:36s} reserved {row['reserved_bytes'] / 1e9:7.3f} GB, predicted "
            f"{100 * row['error']:+6.1f} %, of moving {100 * row['error_of_moving']:+6.1f} %"
            f"{' (held out)' if point.is_held_out else ''}",
            flush=True,
        )
    held_out = [row for row in rows if row["held_out"]]
    record = {
        "what": "predicted over reserved bytes of torch's allocator on a stub of CUDA, minus 1",
        **summary(rows),
        "held_out": summary(held_out) if held_out else None,
        "rows": rows,
        **origin(),
    }
    write(args.output, record, hide=["rows"])


def _known(path: Path) -> dict[str, dict[str, int]]:
    kinds = ("held", "peak", "reserved", "needed")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["name"]: {kind: row[f"{kind}_bytes"] for kind in kinds} for row in rows}


if __name__ == "__main__":
    main()
