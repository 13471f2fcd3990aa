"""Peak memory of one rank of a layout, in torch's own allocator, without a GPU.

    python tests/gpu_stub/on_stub.py bench/stub_peak.py WORLD RANK FLAGS...

Measures on the stub of CUDA as `copus_ext/extras/accept/peak_of_rank.py` does on a GPU; kernels do
nothing, so that a model of any size is quick. Prints one line of JSON, with the least memory in
which a step ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

import torch

from copus_ext.extras.accept.peak_of_rank import one_rank, peak_of

VOCAB_SIZE = 50176
"""Padded; it divides by every tensor parallel size."""


def needed(take_step: Callable[[], None], reserved: int) -> int:
    """The smallest memory, in steps of 1 %, in which a step ends. Where it runs full, the allocator
    gives back what is cached, so that this is less than what it reserves with room to spare."""
    total = torch.cuda.get_device_properties(0).total_memory
    found = reserved
    for percent in range(99, 50, -1):
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(percent / 100 * reserved / total)
        try:
            take_step()
        except torch.OutOfMemoryError:
            break
        found = percent * reserved // 100
    return found


def main() -> None:
    """Prints the result, and leaves without closing groups that are none."""
    world, rank, *flags = sys.argv[1:]
    flags += ["--padded-vocab-size", str(VOCAB_SIZE)]
    with one_rank(int(world), int(rank), flags) as take_step:
        seen = peak_of(take_step)
        seen["needed"] = needed(take_step, seen["reserved"])
        print("PEAK " + json.dumps(seen), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
