"""Kernels of the stub in every Python process that finds this folder on its path: for a program
that starts others by itself."""

import os

if "libcudart" in os.environ.get("LD_PRELOAD", "") and os.environ.get("STUB_KERNELS") != "none":
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
    from tests.gpu_stub import real_kernels

    real_kernels.start()
