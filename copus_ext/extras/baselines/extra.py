"""Published rules for the batch, to compare with."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="published policies",
    policies={
        "copus": "paper:PAPER",
        "cbs": "published:CRITICAL_BATCH_SIZE",
        "norm_test": "published:NORM_TEST",
        "seesaw": "published:SEESAW",
    },
)
