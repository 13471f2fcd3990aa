"""Muon for matrices, Adam for the rest."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="Muon",
    flags="flags:MuonConfig",
    check="flags:check_muon",
    optimizers=("muon", "dist_muon"),
    in_groups={"muon_momentum": "momentum"},
    layout_problems="flags:layout_problems",
    controller_problems="flags:controller_problems",
    planned="flags:planned",
    cost_terms="planner:cost_terms",
)
