"""Checks of the product on the machine at hand."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(
    title="acceptance on a machine",
    commands={"accept": "command"},
    callbacks="observer:callbacks",
)
