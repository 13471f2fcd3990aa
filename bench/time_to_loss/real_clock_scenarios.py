"""What runs on the real clock: models, links, batches and lengths (`real_clock.py`).

S3 and S4 stand in the table of claims of docs/results.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from bench.support import QUICKSTART_MODEL

NO_LIMIT = "0"


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a scenario's runs share, and which runs it has."""

    name: str
    model: str
    """Flags."""
    copus: str
    """Flags."""
    samples: int
    """Length of a run; a multiple of evaluations times the largest first batch."""
    links: tuple[str, ...]
    """Mbit/s; 0 is a link without limit."""
    starts: tuple[int, ...]
    """First batches of runs under the controller."""
    statics: tuple[int, ...]
    """Those that say most come first."""
    reference_batch: int
    """Whose rate and warm-up the controller gets."""
    lr: float
    """At the reference batch, where the search begins."""
    layouts: tuple[str, ...]
    """In which static batches are timed."""
    start_micro_batch: int
    """Largest, of a run's first steps."""
    timed_micro_batches: tuple[int, ...]
    lengths: tuple[tuple[int, float], ...]
    """(batch, part of the samples) of static runs of other lengths, each with a schedule of its
    own. A run under the controller ends at a loss between those where two static batches end. The
    one that misses it by little gets there in a longer run, and the other one in a shorter."""
    seeds: tuple[int, ...] = (1, 2, 3)
    seen: tuple[int, ...] = ()
    """Seeds that were in view when the rule was chosen. They are shown apart."""
    sharing: tuple[int, ...] = ()
    """Seeds that share the runs under the controller between them, and have no timings. They count
    when all of them are complete."""
    rates: tuple[int, ...] = (-1, 0, 1)
    """Powers of 2 times the first rate that are tried at first."""
    warmups: tuple[float, ...] = (0.1, 0.3)
    """Parts of the samples."""
    eval_samples: int = 64
    """Held-out, of each evaluation."""
    evaluations: int = 32
    static_layout: str = "tp1.pp1.dp2"
    """In which static runs are trained. Those on one rank are trained two at a time."""

    def starts_of(self, seed: int) -> dict[str, list[int]]:
        """First batches of a seed's runs under the controller, by link.

        Seeds that share them take turns. So each has every first batch and every link about equally
        often, where the number of first batches is not a multiple of that of the seeds.
        """
        runs = [(link, batch) for link in self.links for batch in self.starts]
        if seed in self.sharing:
            runs = runs[self.sharing.index(seed) :: len(self.sharing)]
        return {link: [b for at, b in runs if at == link] for link in self.links}

    @property
    def digest(self) -> str:
        """Of all that a run's losses and times depend on. Rows with another one do not count."""
        words = (self.model, self.copus, self.samples, self.lr, self.reference_batch)
        more = (self.eval_samples, self.evaluations, self.start_micro_batch)
        return hashlib.sha256(repr((words, more)).encode()).hexdigest()[:8]


def _model(layers: int, hidden: int, ffn: int, heads: int) -> str:
    """The quickstart's model in another size."""
    words = " ".join(QUICKSTART_MODEL.split()).replace("layers 8", f"layers {layers}")
    words = words.replace("hidden-size 256", f"hidden-size {hidden}")
    words = words.replace("ffn-hidden-size 1024", f"ffn-hidden-size {ffn}")
    return words.replace("heads 8", f"heads {heads}").replace("--eval-iters 0", "").strip()


S3 = Scenario(
    name="S3",
    # A layout that is moved to has these overlaps too.
    model=_model(8, 256, 1024, 8) + " --overlap-grad-reduce --overlap-param-gather",
    copus="--copus --copus-layouts all",
    samples=4096,
    links=("5000", "2000", NO_LIMIT),
    starts=(4, 2, 8, 16, 32),
    statics=(8, 4, 16, 2, 32),
    reference_batch=4,
    lr=7e-4,
    layouts=("tp1.pp1.dp2", "tp1.pp2.vpp4.dp1"),
    start_micro_batch=1,
    timed_micro_batches=(2, 4, 8),
    lengths=((8, 1.25), (4, 0.875)),
    seen=(1,),
    sharing=(2, 3),
    static_layout="tp1.pp1.dp1",
)
S4 = Scenario(
    name="S4",
    model=_model(3, 96, 256, 3),
    copus="--copus",
    samples=15_360,
    links=("100",),
    starts=(32, 8, 128, 2),
    statics=(64, 32, 128, 16, 8),
    reference_batch=32,
    lr=4e-3,
    layouts=("tp1.pp1.dp2",),
    start_micro_batch=16,
    timed_micro_batches=(16, 64),
    lengths=((64, 1.25), (64, 1.5), (32, 0.875)),
    eval_samples=256,
    evaluations=30,
)
