"""Sinks of the tracker by their flags, imported only when asked for: TensorBoard, Weights & Biases,
and those of extras."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.trainer.common.extras import extras_with
from megatron.trainer.logging.tracker import Sink

if TYPE_CHECKING:
    from megatron.trainer.config import Config, LoggingConfig

logger = logging.getLogger(__name__)


class TensorBoardSink:
    """Event files with Megatron's tags: by iteration, and as `<tag> vs samples` by samples."""

    name = "TensorBoard"

    def __init__(self, directory: Path, *, interval: int = 1, queue_size: int = 1000) -> None:
        """Opens an event file.

        Args:
            directory: `--tensorboard-dir`.
            interval: `--tensorboard-log-interval`, steps.
            queue_size: `--tensorboard-queue-size`, scalars held before they are written.

        Raises:
            ImportError: tensorboard is not installed.
        """
        module = importlib.import_module("torch.utils.tensorboard")
        self.interval = interval
        self._writer = module.SummaryWriter(log_dir=str(directory), max_queue=queue_size)

    def scalars(
        self, values: Mapping[str, float], *, iteration: int, consumed_samples: int
    ) -> None:
        """Writes every value twice, against steps and against samples."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, iteration)
            self._writer.add_scalar(f"{tag} vs samples", value, consumed_samples)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; WANDB_MODE (`offline`, `disabled`) is left to the library."""

    name = "W&B"

    def __init__(
        self,
        *,
        project: str,
        directory: Path,
        experiment: str | None = None,
        entity: str | None = None,
        interval: int = 1,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts the run.

        Args:
            directory: `--wandb-save-dir`; made if missing.
            experiment: `--wandb-exp-name`.
            config: shown beside the run; nothing of the environment.

        Raises:
            ImportError: wandb is not installed.
        """
        wandb = importlib.import_module("wandb")
        directory.mkdir(parents=True, exist_ok=True)
        self.interval = interval
        self._run = wandb.init(
            project=project,
            name=experiment,
            entity=entity,
            dir=str(directory),
            config=dict(config or {}),
        )

    def scalars(
        self, values: Mapping[str, float], *, iteration: int, consumed_samples: int
    ) -> None:
        self._run.log({**values, "samples": consumed_samples}, step=iteration)

    def close(self) -> None:
        self._run.finish()


def open_sinks(
    logging_config: LoggingConfig, run_dir: Path, *, config: Mapping[str, Any] | None = None
) -> list[Sink]:
    """Returns the sinks that the flags ask for; one that cannot start is left out with a warning.

    Args:
        logging_config: its `tensorboard_*` and `wandb_*` fields.
        run_dir: where W&B writes unless `--wandb-save-dir` says otherwise.
        config: resolved configuration, shown by W&B.
    """
    c = logging_config
    sinks: list[Sink] = []
    if c.tensorboard_dir:
        directory = Path(c.tensorboard_dir)

        def tensorboard() -> Sink:
            return TensorBoardSink(
                directory,
                interval=c.tensorboard_log_interval,
                queue_size=c.tensorboard_queue_size,
            )

        sinks += started("--tensorboard-dir", "track", tensorboard)
    if c.wandb_project:
        project = c.wandb_project

        def wandb() -> Sink:
            return WandbSink(
                project=project,
                directory=Path(c.wandb_save_dir) if c.wandb_save_dir else run_dir / "wandb",
                experiment=c.wandb_exp_name or None,
                entity=c.wandb_entity or None,
                interval=c.tensorboard_log_interval,
                config=config,
            )

        sinks += started("--wandb-project", "wandb", wandb)
    return sinks


def sinks_of_extras(config: Config, run_dir: Path) -> list[Sink]:
    """The same of the extras; see `Extra.sinks`."""
    return [sink for _, sinks in extras_with("sinks") for sink in sinks(config, run_dir)]


def started(flag: str, requirement: str, start: Callable[[], Sink]) -> list[Sink]:
    """A sink, or none and a warning where it cannot start.

    Args:
        flag: that asks for it.
        requirement: of setup.py, which brings its library.
    """
    try:
        return [start()]
    except ImportError as error:
        logger.warning('%s ignored: %s; run: pip install -e ".[%s]"', flag, error, requirement)
    except Exception as error:
        logger.warning("%s ignored, it could not be started: %r", flag, error)
    return []
