"""GPUs that this process may use, and whether the installed torch can. Imports no torch, which
would occupy them."""

from __future__ import annotations

import functools
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.trainer.common.errors import UsageError


def visible_gpus(env: Mapping[str, str]) -> int:
    """Number of GPUs that this process may use. Asks no library, which would occupy them."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    names = [name.strip() for name in listed.split(",")]
    # CUDA takes those before the first that makes no sense.
    ends = [i for i, name in enumerate(names) if name in ("", "-1", "NoDevFiles")]
    return min(ends, default=len(names))


def _has_gpu_nodes() -> bool:
    """Whether the system shows a GPU of any kind."""
    return any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "kfd", "dxg"))


@functools.cache
def torch_uses_gpus() -> bool:
    """Whether the installed torch is built for GPUs; True where that is not known."""
    spec = importlib.util.find_spec("torch")
    places = () if spec is None else spec.submodule_search_locations or ()
    return all(build_uses_gpus(Path(place)) for place in places)


def build_uses_gpus(package: Path) -> bool:
    """Whether a build of torch is one for GPUs; True where it does not say."""
    try:
        # This file imports nothing of torch.
        found = runpy.run_path(str(package / "version.py"))
        return any(found[name] is not None for name in ("cuda", "hip"))
    except Exception:
        return True


def driver_version(file: Path = Path("/sys/module/nvidia/version")) -> str | None:
    """Of NVIDIA's driver, such as `580.65.06`; None where none is loaded."""
    try:
        return file.read_text().strip() or None
    except OSError:
        return None


def check_torch_build(
    device: str, env: Mapping[str, str] | None = None, *, found: int | None = None
) -> None:
    """Refuses to compute on CPUs beside idle GPUs because torch was installed on a node without, or
    is too new for the driver.

    Args:
        device: `--device`; with `cpu` the user wants that.
        found: number of GPUs that torch can use; None to ask it, if this process has imported it.

    Raises:
        UsageError: the installed torch cannot use the GPUs that this process sees.
    """
    number = visible_gpus(os.environ if env is None else env)
    # Some set CUDA_VISIBLE_DEVICES on machines without GPUs, too.
    if device == "cpu" or number == 0 or not _has_gpu_nodes():
        return
    shown = "1 GPU is" if number == 1 else f"{number} GPUs are"
    if torch_uses_gpus():
        if found is None:
            torch: Any = sys.modules.get("torch")
            found = int(torch is None or torch.cuda.is_available())
        if found:
            return
        driver = driver_version()
        why = f"NVIDIA's driver {driver} is too old or broken" if driver else "no driver is loaded"
        raise UsageError(
            f"{shown} visible, but the installed torch cannot use them: {why}; torch for CUDA 13 "
            "needs NVIDIA's driver 580 or newer: update it, install a torch for an older CUDA, or "
            "give --device cpu"
        )
    raise UsageError(
        f"{shown} visible, but the installed torch is a build for CPUs; install its CUDA build (in "
        "a checkout: COPUS_TORCH=cuda bash scripts/setup_env.sh run) or give --device cpu"
    )
