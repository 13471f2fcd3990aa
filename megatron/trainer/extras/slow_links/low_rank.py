"""Matrices as products of two thin ones, for links that are slow.

One power iteration from the factor of the last time finds a good product, without a search.
"""

from __future__ import annotations

from typing import Any

import torch

_SEED = 1


def is_shorter(rank: int, rows: int, columns: int) -> bool:
    """Whether two factors have fewer numbers than the matrix."""
    return rank * (rows + columns) < rows * columns


def first_factor(rank: int, columns: int, *, device: Any) -> torch.Tensor:
    """[columns, rank] numbers to begin with, fp32. They are the same on every rank and in every
    launch, and leave the random streams of the run alone."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(columns, rank, generator=generator).to(device)


def orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """[rows, rank] orthonormal columns that span those of a matrix, fp32. Entries that are not
    finite count as 0."""
    return torch.linalg.qr(matrix.float().nan_to_num(0.0, 0.0, 0.0)).Q


class LowRankMessages:
    """Encodes matrices of one shape after another, each as two factors.

    The sender begins each with the second factor of the last. Nothing else is kept, and what a
    message loses is lost. The receiver needs no state.

    Args:
        rank: most columns of a factor.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._factor: torch.Tensor | None = None

    def is_shorter(self, shape: Any) -> bool:
        """Whether two factors are shorter than a tensor [..., width] of this shape."""
        rows, columns = _matrix(shape)
        return is_shorter(self._rank_of(rows, columns), rows, columns)

    def _rank_of(self, rows: int, columns: int) -> int:
        return min(self._rank, rows, columns)

    @torch.no_grad()
    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Both factors of a tensor [..., width], one after the other, in its dtype.

        A tensor that is not finite gives factors that are not finite.
        """
        x = tensor.detach().reshape(-1, tensor.shape[-1]).float()
        rows, columns = x.shape
        rank = self._rank_of(rows, columns)
        last = self._factor
        if last is None or last.shape != (columns, rank):
            last = first_factor(rank, columns, device=x.device)
        left = orthonormal(x @ orthonormal(last))
        right = x.T @ left
        # The next message must not begin with what is not finite.
        self._factor = torch.where(right.isfinite().all(), right, last)
        return torch.cat([left.flatten(), right.flatten()]).to(tensor.dtype)

    def room(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = _matrix(shape)
        size = self._rank_of(rows, columns) * (rows + columns)
        return torch.empty(size, dtype=dtype, device=torch.cuda.current_device())

    @torch.no_grad()
    def decode(self, message: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """The product of the factors in a message, as a tensor of this shape and dtype."""
        rows, columns = _matrix(shape)
        rank = self._rank_of(rows, columns)
        left, right = message.float().split([rows * rank, columns * rank])
        return (left.view(rows, rank) @ right.view(columns, rank).T).to(dtype).view(tuple(shape))


def _matrix(shape: Any) -> tuple[int, int]:
    """Rows and columns of a tensor [..., width]."""
    *rows, columns = shape
    return torch.Size(rows).numel(), columns
