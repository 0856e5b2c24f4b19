"""CUDA's caching allocator: capped at the limit, asked for its peaks by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autobatch.errors import ConfigError
from autobatch.units import format_gib


class CudaMemory:
    """The memory of this process on one GPU.

    Context, library handles and communicator are made first; what they take outside the
    allocator is read, and the allocator is capped at the limit less that. `free_before_bytes` is
    what was free on the card before this process touched it.

    Raises:
        ConfigError: if the limit leaves nothing for tensors.
    """

    def __init__(self, device: torch.device, *, limit_bytes: int, free_before_bytes: int) -> None:
        self._device = device
        self._free_before_bytes = free_before_bytes
        self.phase_peaks: dict[str, int] = {}
        self._peak_allocated = 0
        self._peak_reserved = 0
        _make_handles(device)
        non_torch = self.non_torch_bytes()
        cap = limit_bytes - non_torch
        total = torch.cuda.get_device_properties(device).total_memory
        if cap <= 0:
            raise ConfigError(
                f"the limit {format_gib(limit_bytes)} is below what CUDA itself takes here, "
                f"{format_gib(non_torch)}; give a larger --memory-limit"
            )
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / total), device)
        self.reset_peaks()

    def non_torch_bytes(self) -> int:
        """Return what this process holds on the card outside torch's allocator."""
        free, _ = torch.cuda.mem_get_info(self._device)
        held = self._free_before_bytes - free - torch.cuda.memory_reserved(self._device)
        return max(0, held)

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes of live tensors since the last reset."""
        self._fold()
        return self._peak_allocated

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the allocator held since the last reset."""
        self._fold()
        return self._peak_reserved

    @property
    def num_alloc_retries(self) -> int:
        """How often the allocator emptied its cache to go on, since the last reset."""
        return int(torch.cuda.memory_stats(self._device)["num_alloc_retries"]) - self._retries

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is held now."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak_allocated = self._peak_reserved = 0
        self._retries = int(torch.cuda.memory_stats(self._device)["num_alloc_retries"])
        self.phase_peaks = {}

    def release_cache(self) -> None:
        """Give cached blocks back, so that what follows reserves what it would in a new process."""
        torch.cuda.empty_cache()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the peak of the block under a name."""
        self._fold()
        try:
            yield
        finally:
            peak = torch.cuda.max_memory_allocated(self._device)
            self.phase_peaks[name] = max(self.phase_peaks.get(name, 0), peak)
            self._fold()

    def _fold(self) -> None:
        self._peak_allocated = max(
            self._peak_allocated, torch.cuda.max_memory_allocated(self._device)
        )
        self._peak_reserved = max(self._peak_reserved, torch.cuda.max_memory_reserved(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)


def _make_handles(device: torch.device) -> None:
    """Make context, cuBLAS and attention handles, so that their bytes are seen."""
    with torch.cuda.device(device):
        square = torch.ones(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        (square @ square).sum().backward()
        torch.cuda.synchronize(device)
    del square
    torch.cuda.empty_cache()
