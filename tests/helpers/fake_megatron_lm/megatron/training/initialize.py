"""What seeds the random streams of a checkout."""

from __future__ import annotations

import torch


def _set_random_seed(seed_: int) -> None:
    torch.manual_seed(seed_)
