"""placeholder"""

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Request:
    launch: str
    kind: str
    iteration: int
    consumed_samples: int
    layout: Any = None
    checkpoint: Any = None
    reason: str = ""


def launch_name():
    return os.environ.get("COPUS_LAUNCH", "")


def is_supervised():
    return bool(launch_name())


def write_request(run_dir, request): ...
