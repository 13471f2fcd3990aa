"""Runs that go on with the ranks that are left, and take in those that come."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="elastic runs", launcher="launcher:Elastic")
