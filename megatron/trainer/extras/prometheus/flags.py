"""The flag of the text file, and the sink that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.trainer.config import Config
from megatron.trainer.config.fields import option
from megatron.trainer.logging.sinks import started
from megatron.trainer.logging.tracker import Sink


@dataclass(frozen=True, kw_only=True)
class PrometheusConfig:
    """Flag of the extra."""

    prometheus_textfile: str | None = option(None)
    """Text file for Prometheus's node_exporter. Each log interval rewrites it."""


def sinks(config: Config, run_dir: Path) -> list[Sink]:
    """See `Extra.sinks`."""
    if not (path := config.extras["prometheus"].prometheus_textfile):
        return []
    interval = config.logging.log_interval

    def prometheus() -> Sink:
        from megatron.trainer.extras.prometheus.sink import PrometheusSink

        return PrometheusSink(Path(path), run=str(run_dir), interval=interval)

    return started("--prometheus-textfile", "prometheus", prometheus)
