"""Weights of few bits: rounded to nearest, symmetric, one scale for each group of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.trainer.common.errors import UsageError

_WORD = 32


@dataclass(frozen=True, kw_only=True)
class Quantised:
    values: torch.Tensor
    """[rows, columns] whole numbers of `bits` bits, int8."""
    scales: torch.Tensor
    """[rows, columns / group size] in the number format of the matrix."""
    bits: int

    def whole(self) -> torch.Tensor:
        """[rows, columns] value times scale, in the number format of the scales."""
        rows, groups = self.scales.shape
        values = self.values.view(rows, groups, -1).to(self.scales.dtype)
        return (values * self.scales[..., None]).view(rows, -1)


def check_group_size(group_size: int, columns: int, name: str) -> None:
    """Refuses groups that do not fill a row.

    Raises:
        UsageError: naming the flag.
    """
    if group_size < 8 or group_size % 8 or columns % group_size:
        fitting = [g for g in (128, 64, 32, 16, 8) if columns % g == 0]
        fix = f"such as {fitting[0]}" if fitting else "which none does here"
        raise UsageError(
            f"--group-size {group_size} must be a multiple of 8 that divides the {columns} columns "
            f"of {name}, {fix}"
        )


def quantise(weight: torch.Tensor, bits: int, group_size: int) -> Quantised:
    """Rounds a matrix.

    Args:
        weight: [rows, columns] in the number format in which it is served.
        bits: 2 to 8.
        group_size: weights of a row that share a scale; divides the columns.
    """
    rows, columns = weight.shape
    grouped = weight.reshape(rows, columns // group_size, group_size).float()
    steps = (1 << bits) - 1
    scales = grouped.abs().amax(dim=-1) * (2 / steps)
    # A group of zeros has any scale; one too small for the format becomes its smallest.
    scales = scales.clamp(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
    half = 1 << (bits - 1)
    values = (grouped / scales[..., None].float()).round().clamp(-half, half - 1)
    return Quantised(values=values.to(torch.int8).view(rows, columns), scales=scales, bits=bits)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, columns x bits / 32] words: value i of a word, plus half of the range, from bit i x
    `bits` on."""
    rows, columns = values.shape
    per_word = _WORD // bits
    parts = values.to(torch.int64).view(rows, columns // per_word, per_word) + (1 << (bits - 1))
    shifts = torch.arange(per_word, device=values.device) * bits
    words = (parts << shifts).sum(dim=-1)
    return torch.where(words >= 1 << (_WORD - 1), words - (1 << _WORD), words).to(torch.int32)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    per_word = _WORD // bits
    shifts = torch.arange(per_word, device=words.device) * bits
    parts = (words.to(torch.int64)[..., None] >> shifts) & ((1 << bits) - 1)
    return (parts - (1 << (bits - 1))).to(torch.int8).view(len(words), -1)
