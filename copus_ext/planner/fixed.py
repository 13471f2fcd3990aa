"""What `--fix` keeps: sizes, or all that a CONFIG says."""

from __future__ import annotations

import dataclasses
from typing import Any

from copus_ext.planner.configuration import RECOMPUTE
from copus_ext.planner.request import OPTIONS, SIZES, UsageProblem, is_number, sizes
from copus_ext.planner.space import Limits

_WHOLE = {"tp", "pp", "dp", "micro_batch", "recompute"}


def is_whole(text: str) -> bool:
    """Whether a text says all of a configuration, as one that an answer printed does."""
    return set(sizes("--fix", text, OPTIONS)) >= _WHOLE


def kept(text: str, limits: Limits) -> Limits:
    """The limits of a search that keeps what a text says: `tp=4,pp=2`, or a CONFIG as printed.

    Raises:
        UsageProblem: another text.
    """
    given = sizes("--fix", text, OPTIONS)
    fixed = {name: given[name] for name in SIZES if name in given}
    more: dict[str, Any] = {}
    if (how := given.get("recompute")) is not None:
        kind, _, layers = how.partition(":")
        if kind not in RECOMPUTE or (kind == "block") != is_number(layers):
            raise UsageProblem(f"--fix {text}: recompute is one of none, selective, full, block:3")
        more["recompute"] = (kind,)
        fixed |= {"recompute_num_layers": int(layers)} if layers else {}
    for name, field in (
        ("sp", "sequence_parallel"),
        ("zero", "use_distributed_optimizer"),
        ("overlap", "overlap"),
        ("use_tp_pp_dp_mapping", "use_tp_pp_dp_mapping"),
    ):
        if (value := given.get(name)) is None:
            continue
        if value not in ("0", "1"):
            raise UsageProblem(f"--fix {text}: {name} is 0 or 1")
        # A single tensor-parallel rank has nothing to split.
        if name != "sp" or given.get("tp") != 1:
            more[field] = (value == "1",) if name == "zero" else value == "1"
    if (form := given.get("cp_comm_type")) is not None:
        more["cp_comm_types"] = (form,)
    chunks = given.get("logits_chunks", "1" if set(given) >= _WHOLE else None)
    if chunks is not None:
        if not (is_number(chunks) and int(chunks)):
            raise UsageProblem(f"--fix {text}: logits_chunks is a whole number from 1 on")
        more["logits_chunks"] = (int(chunks),)
    return dataclasses.replace(limits, fixed=fixed, **more)
