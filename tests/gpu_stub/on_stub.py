"""A program on the stub of CUDA: `on_stub.py PROGRAM ARGUMENT...`, with any Python.

It goes on as the Python of `setup.sh`, with the stub's libraries in the place of CUDA's.
`STUB_KERNELS=none` leaves kernels without effect, for what depends on no number, and `small` all
but those of small tensors, such as the choice of experts.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (
    "libcuda.so.1",
    "libcudart.so.13",
    "libcublasLt.so.13",
    "libcublas.so.13",
    "libnccl.so.2",
    "libnvidia-ml.so.1",
)


def venv() -> Path:
    """The environment of `setup.sh`, which may not be there."""
    return Path(os.environ.get("COPUS_GPU_STUB_VENV") or _ROOT / ".venv-gpu-stub").absolute()


def missing() -> str | None:
    """Why nothing can run on the stub; None where it can."""
    if (venv() / "stub/done").exists():
        return None
    return f"no CUDA build of torch in {venv()}; run bash tests/gpu_stub/setup.sh"


def libraries() -> dict[str, str]:
    """Environment variables that put the stub in the place of CUDA for a Python of `venv`."""
    preloaded = [str(venv() / "stub" / name) for name in LIBRARIES]
    return {
        "LD_PRELOAD": ":".join(preloaded),
        # Kernels that are compiled as the run goes, and cuDNN, have no stub.
        "TORCHDYNAMO_DISABLE": "1",
        "DISABLE_ADDMM_CUDA_LT": "1",
        "TORCH_CUDNN_SDPA_ENABLED": "0",
    }


def _enter() -> None:
    python = str(venv() / "bin/python")
    os.execve(python, [python, *sys.argv], {**os.environ, **libraries()})


def main() -> None:
    if "libcudart" not in os.environ.get("LD_PRELOAD", ""):
        _enter()
    sys.path[0] = str(_ROOT)
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    kernels = os.environ.get("STUB_KERNELS", "all")
    if kernels != "none":
        from tests.gpu_stub import real_kernels

        real_kernels.start(*([1 << 20] if kernels == "small" else []))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
