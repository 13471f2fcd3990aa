"""Takes one step with dropout. Launches of one, two and four ranks share one folder: each compares
its gradients with those of the layout without context parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.worker_context import (
    A2A,
    CP2,
    CP4,
    MODELS,
    PP2,
    RECOMPUTE,
    TP2,
    distances,
    first_step,
)

DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.2"
LAYOUTS = {
    1: {"one": ""},
    2: {"tp2": TP2, "pp2": PP2, "cp2": CP2, "cp2 a2a": f"{CP2} {A2A} {RECOMPUTE}"},
    4: {
        "cp4": f"{CP4} --recompute-activations",
        "cp4 a2a": f"{CP4} {A2A}",
        "tp2 cp2": f"{TP2} {CP2}",
        "tp2 cp2 a2a": f"{TP2} {CP2} {A2A}",
        "pp2 cp2": f"{PP2} {CP2} {RECOMPUTE}",
    },
}
"""Ranks -> name -> flags of the layout."""
OF_MODEL = {
    "llama": tuple(name for layouts in LAYOUTS.values() for name in layouts),
    "gpt2": ("one", "cp2", "cp4 a2a"),
    "latent": ("one", "cp2 a2a", "cp4"),
}
CASES = [(model, layout) for model, layouts in OF_MODEL.items() for layout in layouts]


def whole_of(layout: str) -> str:
    """The layout without context parallelism."""
    return layout.split()[0] if layout[:2] in ("tp", "pp") else "one"


def main(output: Path, ranks: str) -> dict[str, dict[str, Any]]:
    """Returns loss and distances of each case of so many ranks, and distances of the gradients
    without dropout."""
    import torch
    import torch.distributed as dist

    rows: dict[str, dict[str, Any]] = {}
    layouts = LAYOUTS[int(ranks)]
    for model, layout in (case for case in CASES if case[1] in layouts):
        name = f"{model} {layout}"
        folder = output / name.replace(" ", "_")
        base = MODELS[model].replace("--hidden-dropout 0 --attention-dropout 0", DROPOUT)
        assert DROPOUT in base
        loss, own = first_step(layouts[layout], folder, base=base)
        file = output / f"{model} {whole_of(layout)}.pt"
        if whole_of(layout) == layout and dist.get_rank() == 0:
            torch.save(own, file)
        dist.barrier()
        rows[name] = {"loss": loss, "distances": distances(own, torch.load(file))}
        if layout == "one":
            _, whole = first_step("", output / f"{model}_kept", base=MODELS[model])
            rows[name]["without dropout"] = distances(whole, own)
    return rows
