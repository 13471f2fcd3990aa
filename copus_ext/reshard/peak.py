"""The most memory of a GPU that a change of layout takes in truth."""

from __future__ import annotations

import torch


class MovePeak:
    """Looks at the GPU from time to time; sees nothing in a process without one.

    Buffers of NCCL lie outside of torch's allocator, which keeps a peak of its own alone. So each
    look adds what lies outside by then to that peak since the last look.
    """

    def __init__(self) -> None:
        self.bytes = 0.0
        """The most so far, with context and libraries."""
        self._has_gpu = torch.cuda.is_initialized()
        if self._has_gpu:
            torch.cuda.reset_peak_memory_stats()

    def look(self) -> None:
        """Takes in what has happened since the last look."""
        if self._has_gpu:
            free, total = torch.cuda.mem_get_info()
            outside = total - free - torch.cuda.memory_reserved()
            self.bytes = max(self.bytes, torch.cuda.max_memory_reserved() + outside)
            torch.cuda.reset_peak_memory_stats()
