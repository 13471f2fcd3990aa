"""A GPT of 0.12M parameters in plain PyTorch, and one training run of it on one core.

It reads bytes of this Python's standard library. Rates and warm-up are functions of the samples
trained so far, so that every batch schedule of one length sees the same schedule. The atlas of real
runs is made with it, and the controller's decisions are tried on it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
Kind = Literal["cosine", "constant", "wsd"]
_END_OF_COSINE, _END_OF_WSD, _WSD_DECAY = 0.05, 0.05, 0.2


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

    def logits(self, inputs: Tensor) -> Tensor:
        """[samples, SEQ_LENGTH, VOCABULARY] for [samples, SEQ_LENGTH] bytes."""
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T

    def loss(self, samples: Tensor) -> Tensor:
        """Mean loss of [samples, SEQ_LENGTH + 1] bytes, nats a byte."""
        logits = self.logits(samples[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a run depends on but its batches."""

    total_samples: int
    """Length of the run."""
    learning_rate: float
    """Peak at a batch of `REFERENCE_BATCH`; it goes with the root of the batch."""
    warmup: float
    """Share of the samples over which the rate rises in proportion to them."""
    kind: Kind = "cosine"
    """`cosine` falls to 5 %; `wsd` falls to 5 % over the last fifth; `constant` stays."""
    seed: int = 0
    """Of the weights and of the order of the samples."""

    def rate(self, samples: float) -> float:
        """The scheduled rate over its peak after so many samples."""
        done = samples / self.total_samples
        if done < self.warmup:
            return (done + 1e-4) / self.warmup
        if self.kind == "constant":
            return 1.0
        if self.kind == "wsd":
            fall = min(max((done - 1 + _WSD_DECAY) / _WSD_DECAY, 0.0), 1.0)
            return 1 - (1 - _END_OF_WSD) * fall
        part = min((done - self.warmup) / (1 - self.warmup), 1.0)
        return _END_OF_COSINE + (1 - _END_OF_COSINE) * (1 + math.cos(math.pi * part)) / 2


@dataclass(frozen=True)
class Snapshot:
    """A run at a step boundary, to return to."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    samples: int
    steps: int


class SmallRun:
    """One run: weights, AdamW (0.9, 0.95) without weight decay, norm clipped to 1.

    Args:
        recipe: what it depends on.
    """

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.model = SmallGPT()
        self._parameters: list[Any] = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.train, self.held_out = corpus()
        order = np.random.default_rng(recipe.seed + 100).permutation(len(self.train))
        self.order = torch.from_numpy(order)
        self.samples = self.steps = 0
        self.lr_multiple: float | None = None
        """Beside the recipe's rate; None: the root of the batch over `REFERENCE_BATCH`."""
        self.squared_norms: tuple[float, float] | None = None
        """Of the last step's gradients: mean of its groups, and of their mean; None for one
        group."""

    def step(self, batch: int, groups: int = 1) -> float:
        """Trains on the next `batch` samples.

        Args:
            batch: samples of the step.
            groups: equal parts whose gradients are compared; it divides the batch.

        Returns:
            Mean loss of the samples before the step, nats a byte.
        """
        where = (self.samples + torch.arange(batch)) % len(self.order)
        data = self.train[self.order[where]]
        multiple = self.lr_multiple
        if multiple is None:
            multiple = math.sqrt(batch / REFERENCE_BATCH)
        lr = self.recipe.learning_rate * multiple
        for group in self.optimizer.param_groups:
            group["lr"] = lr * self.recipe.rate(self.samples + batch / 2)
        self.optimizer.zero_grad()
        total, norms = 0.0, []
        before = torch.zeros(())
        for group in data.split(batch // groups):
            for part in group.split(_MICRO_BATCH):
                loss = self.model.loss(part) * (len(part) / batch)
                loss.backward()
                total += loss.item()
            if groups > 1:
                now = torch.cat([p.grad.flatten() for p in self._parameters])
                norms.append(float(((now - before) * groups).square().sum()))
                before = now
        self.squared_norms = None
        if groups > 1:
            self.squared_norms = sum(norms) / groups, float(before.square().sum())
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.samples += batch
        self.steps += 1
        return total

    @torch.no_grad()
    def evaluate(self, samples: int = HELD_OUT) -> float:
        """Mean loss of the first so many held-out samples, nats a byte."""
        parts = self.held_out[:samples].split(256)
        return sum(self.model.loss(part).item() * len(part) for part in parts) / samples

    def snapshot(self) -> Snapshot:
        """A copy of everything that a step changes."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return copy.deepcopy(Snapshot(model, optimizer, self.samples, self.steps))

    def restore(self, snapshot: Snapshot) -> None:
        """Returns to a snapshot, bit for bit; it can be used again."""
        snapshot = copy.deepcopy(snapshot)
        self.model.load_state_dict(snapshot.model)
        self.optimizer.load_state_dict(snapshot.optimizer)
        self.samples, self.steps = snapshot.samples, snapshot.steps


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The batch over the run: pieces, and growth as the rate decays."""

    pieces: tuple[tuple[float, int], ...]
    """(share of the samples from which it holds, batch), the first from 0."""
    decay: float = 0.0
    """After the warm-up the batch is divided by this power of the scheduled rate over its peak."""

    def batch(self, recipe: Recipe, samples: int) -> int:
        """The batch after so many samples, half a power of two."""
        done = samples / recipe.total_samples
        batch = float([size for start, size in self.pieces if start <= done][-1])
        if self.decay and done > recipe.warmup:
            batch /= recipe.rate(samples) ** self.decay
            batch = 2 ** (round(2 * math.log2(batch)) / 2)
        return max(round(batch), 1)

    @property
    def name(self) -> str:
        """Such as `16,0.05:32,0.15:64 f^-0.5`."""
        pieces = ",".join(f"{a:g}:{b}" if a else str(b) for a, b in self.pieces)
        return f"{pieces} f^-{self.decay:g}" if self.decay else pieces


def train(
    recipe: Recipe, schedule: BatchSchedule, *, evaluations: Sequence[float], samples: int = 512
) -> tuple[SmallRun, list[tuple[int, int, float]]]:
    """Trains to the end.

    Args:
        recipe: of the run.
        schedule: its batches.
        evaluations: shares of the run after which to evaluate, ascending.
        samples: held-out samples of these evaluations.

    Returns:
        The run, and (samples, steps, loss) of each evaluation.
    """
    run, curve, waiting = SmallRun(recipe), [], list(evaluations)
    while (left := recipe.total_samples - run.samples) > 0:
        run.step(min(schedule.batch(recipe, run.samples), left))
        if waiting and run.samples >= waiting[0] * recipe.total_samples:
            curve.append((run.samples, run.steps, round(run.evaluate(samples), 4)))
            waiting = [share for share in waiting if run.samples < share * recipe.total_samples]
    return run, curve
