"""A GPT of 0.12M parameters in plain PyTorch, and one training run of it on one core.

It reads bytes of this Python's standard library. Rate and warm-up are functions of the samples
trained so far, so that all batches of one length see the same schedule.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEQ_LENGTH, WIDTH, LAYERS, HEADS, VOCABULARY = 64, 64, 2, 4, 256
REFERENCE_BATCH = 32
"""Batch that a learning rate is named for, samples."""
HELD_OUT = 2048
"""Held-out samples."""
_MICRO_BATCH = 128
_HELD_OUT_FILES = 20
_END_OF_COSINE = 0.05


@functools.cache
def corpus() -> tuple[Tensor, Tensor]:
    """[samples, SEQ_LENGTH + 1] bytes to train on, and HELD_OUT samples of other files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[Any], list[Any]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        digest = hashlib.md5(str(path.relative_to(root)).encode(), usedforsecurity=False)
        text = np.frombuffer(path.read_bytes() + b"\0", dtype=np.uint8)
        parts[int(digest.hexdigest(), 16) % _HELD_OUT_FILES == 0].append(text)
    train, held_out = (_cut(np.concatenate(part)) for part in parts)
    chosen = np.random.default_rng(0).permutation(len(held_out))[:HELD_OUT]
    return torch.from_numpy(train), torch.from_numpy(held_out[chosen])


def _cut(text: Any) -> Any:
    count = (len(text) - 1) // SEQ_LENGTH
    starts = np.arange(count)[:, None] * SEQ_LENGTH
    return text[starts + np.arange(SEQ_LENGTH + 1)].astype(np.int64)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class SmallGPT(nn.Module):
    """Two layers of width 64, learned positions, tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQ_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0, 0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(weight, 0, 0.02 / math.sqrt(2 * LAYERS))

    def loss(self, samples: Tensor) -> Tensor:
        """Mean loss of [samples, SEQ_LENGTH + 1] bytes, nats a byte."""
        x = self.tokens(samples[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a run depends on but its batches."""

    total_samples: int
    """Length of the run."""
    learning_rate: float
    """Peak at a batch of `REFERENCE_BATCH`."""
    warmup: float
    """Share of the samples over which the rate rises in proportion to them; then it falls to 5 % as
    a cosine."""
    seed: int
    """Of the weights and of the order of the samples."""

    def rate(self, samples: float) -> float:
        """The scheduled rate over its peak after so many samples."""
        done = samples / self.total_samples
        if done < self.warmup:
            return (done + 1e-4) / self.warmup
        part = min((done - self.warmup) / (1 - self.warmup), 1.0)
        return _END_OF_COSINE + (1 - _END_OF_COSINE) * (1 + math.cos(math.pi * part)) / 2


class SmallRun:
    """One run: weights, AdamW (0.9, 0.95) without weight decay, norm clipped to 1."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = SmallGPT()
        self._parameters: list[Any] = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self._train, self._held_out = corpus()
        order = np.random.default_rng(recipe.seed + 100).permutation(len(self._train))
        self._order = torch.from_numpy(order)
        self.samples = 0
        self.squares: tuple[float, float] | None = None
        """Squared norms of the last step's gradients, summed over its groups, and of their mean;
        None where they were not compared."""

    def step(self, batch: int, lr_factor: float, groups: int = 1) -> float:
        """Trains on the next `batch` samples.

        Args:
            batch: samples of the step.
            lr_factor: of the learning rate, beside the recipe's.
            groups: equal parts whose gradients are compared; it divides the batch.

        Returns:
            Mean loss of the samples before the step, nats a byte.
        """
        where = (self.samples + torch.arange(batch)) % len(self._order)
        data = self._train[self._order[where]]
        lr = self.recipe.learning_rate * lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self.recipe.rate(self.samples + batch / 2)
        self.optimizer.zero_grad()
        total, squares = 0.0, 0.0
        before = torch.zeros(())
        for group in data.split(batch // groups):
            for part in group.split(_MICRO_BATCH):
                loss = self.model.loss(part) * (len(part) / batch)
                loss.backward()
                total += loss.item()
            if groups > 1:
                now = torch.cat([p.grad.flatten() for p in self._parameters])
                squares += float(((now - before) * groups).square().sum())
                before = now
        self.squares = (squares, float(before.square().sum())) if groups > 1 else None
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self.optimizer.step()
        self.samples += batch
        return total

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of the held-out samples, nats a byte."""
        parts = self._held_out.split(256)
        return sum(self.model.loss(part).item() * len(part) for part in parts) / HELD_OUT


def static_loss(recipe: Recipe, batch: int) -> float:
    """Last loss of a static batch, whose rate goes with the root of it."""
    run = SmallRun(recipe)
    while (left := recipe.total_samples - run.samples) > 0:
        size = min(batch, left)
        run.step(size, math.sqrt(size / REFERENCE_BATCH))
    return run.evaluate()
