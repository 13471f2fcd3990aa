"""Shorter messages where links are slow: 8 bits, low rank, PowerSGD."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="slow links",
    flags="flags:SlowLinksConfig",
    check="flags:check_slow_links",
    layout_problems="flags:layout_problems",
    controller_problems="flags:controller_problems",
    unpriced=("grad_compression_rank", "grad_compression_stages", "pipeline_message_rank"),
    suggests={"pipeline_message_bits": 8},
    cost_terms="planner:cost_terms",
    feature="feature:slow_links_of",
)
