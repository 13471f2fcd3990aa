"""What is inside a checkpoint, and under which layouts it loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron.trainer.checkpoint import files
from megatron.trainer.common.errors import Refused
from megatron.trainer.config.layout import Layout
from megatron.trainer.extras.inspect_checkpoint import contents
from megatron.trainer.extras.inspect_checkpoint.archive import Archive, StoredTensor
from megatron.trainer.extras.inspect_checkpoint.checks import (
    check_contents,
    check_files,
    check_truth,
)
from megatron.trainer.extras.inspect_checkpoint.layouts import (
    batch_problems_of,
    problems_of,
    stored_layout,
)


def describe(archive: Archive, *, verify: bool) -> dict[str, Any]:
    """Everything that the command inspect-checkpoint prints, as JSON-safe values.

    Args:
        verify: read every file and compare checksums, and weights with their masters.

    Returns:
        Among others `problem`, which is None for a checkpoint that was proved complete, and
        `exit_code`: 0, 3 if it is not complete, 4 if `verify` found it changed. `verified` says
        that every byte of every file was compared with the manifest.
    """
    arguments = archive.arguments
    record: dict[str, Any] = {
        "folder": str(archive.folder),
        "iteration": archive.iteration,
        "consumed_samples": arguments.get("consumed_train_samples"),
        "layout": str(stored_layout(arguments)),
        "experts": None,
        "padded_vocab_size": arguments.get("padded_vocab_size"),
        "true_vocab_size": contents.true_vocab_size(arguments),
        "bytes": files.stored_bytes(archive.folder),
        "bytes_by_state": _bytes_by_state(archive),
        "tensors": [_tensor(tensor) for tensor in archive.tensors.values()],
        "num_objects": len(archive.blobs),
        "has_manifest": (archive.folder / files.MANIFEST).is_file(),
    }
    problem, code, found, notes = None, 0, None, []
    try:
        notes = check_files(archive, checksums=False)
        record["experts"] = experts_in(arguments)
        found = check_contents(archive)
        record |= {"dtype": _name(found.dtype), "optimizer": found.optimizer}
        record["loads_under"] = loads_under(arguments)
    except Refused as error:
        problem, code = str(error), 3
    if verify and found is not None:
        try:
            check_files(archive)
            check_truth(archive, found)
        except Refused as error:
            problem, code = str(error), 4
    is_verified = verify and code == 0 and not notes
    record |= {"verified": is_verified, "notes": notes, "problem": problem, "exit_code": code}
    return record


def experts_in(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the stored flags say of experts; None for a dense model."""
    if not arguments.get("num_experts"):
        return None
    return {
        "num_experts": arguments["num_experts"],
        "topk": arguments.get("moe_router_topk", 2),
        "layers": sum(contents.experts_of_layers(arguments) or ()),
        "shared": arguments.get("moe_shared_expert_intermediate_size"),
    }


def loads_under(arguments: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Sizes that a launch would accept with the stored flags, each by itself.

    Heads and vocabulary depend on TP alone, layers on PP x VPP, experts on EP, and their width on
    their own TP. The batch depends on DP, and with a virtual pipeline on PP.
    """
    vocab, layers = arguments["padded_vocab_size"], arguments["num_layers"]

    def is_legal(layout: Layout) -> bool:
        return not problems_of(arguments, layout, vocab)

    def cuts_batches(layout: Layout) -> bool:
        return not batch_problems_of(arguments, layout, keeps_extras=True)

    heads = arguments["num_attention_heads"]
    pipelines = [(1, 1), *((p, v) for p in range(2, layers + 1) for v in range(1, layers + 1))]
    batch = arguments.get("global_batch_size") or 0
    found: dict[str, list[Any]] = {
        "tp": [n for n in range(1, heads + 1) if is_legal(Layout(tp=n))],
        "pp": [
            str(p) if v == 1 else f"{p}x{v}"
            for p, v in pipelines
            if p * v <= layers and is_legal(at := Layout(pp=p, vpp=v)) and cuts_batches(at)
        ],
        "dp": [n for n in range(1, batch + 1) if cuts_batches(Layout(dp=n))],
    }
    experts = arguments.get("num_experts") or 0
    if experts:
        width = arguments.get("moe_ffn_hidden_size") or arguments["ffn_hidden_size"]
        counts = range(1, experts + 1)
        found["ep"] = [n for n in counts if is_legal(Layout(ep=n, dp=n))]
        found["etp"] = [n for n in range(1, width + 1) if is_legal(Layout(etp=n, dp=n))]
    return found


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "key": tensor.key,
        "shape": list(tensor.shape),
        "dtype": _name(tensor.dtype),
        "num_chunks": len(tensor.chunks),
        "bytes": tensor.num_bytes,
    }


def _bytes_by_state(archive: Archive) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for tensor in archive.tensors.values():
        sizes[contents.kind_of(tensor.key) or "weights"] += tensor.num_bytes
    return dict(sizes)
