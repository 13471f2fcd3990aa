"""K-FAC in front of Adam."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="K-FAC",
    flags="flags:KfacConfig",
    check="flags:check_kfac",
    layout_problems="flags:layout_problems",
    step_period="flags:step_period",
    planned="flags:planned",
    cost_terms="planner:cost_terms",
    feature="precondition:kfac_of",
)
