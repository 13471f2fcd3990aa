"""Writes the numbers of a run as a text file that Prometheus's node_exporter collects."""

from megatron.trainer.common.extras import Extra

EXTRA = Extra(title="metrics for Prometheus", flags="flags:PrometheusConfig", sinks="flags:sinks")
