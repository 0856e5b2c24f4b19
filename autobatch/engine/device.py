"""The device of one rank: claimed once, capped at its limit, asked for its peaks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autobatch.config import Config
from autobatch.engine.account import MemoryAccount
from autobatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What one rank's process took since the last reset."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    non_torch_bytes: int
    num_alloc_retries: int
    phase_peaks: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where a rank computes, and under which limit."""

    torch_device: torch.device
    rank: int
    world_size: int
    limit_bytes: int
    mesh: DeviceMesh | None  # None: one rank without sharding machinery
    account: MemoryAccount

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book peaks under a phase: build, forward, backward, optimizer, save."""
        with self.account.phase(name):
            yield

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is held now."""
        self.account.reset_peaks()

    def memory_use(self) -> MemoryUse:
        """Return the peaks since the last reset. On the CPU reserved equals allocated."""
        return MemoryUse(
            peak_allocated_bytes=self.account.peak_bytes,
            peak_reserved_bytes=self.account.peak_bytes,
            non_torch_bytes=0,
            num_alloc_retries=0,
            phase_peaks=dict(self.account.phase_peaks),
        )

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over all ranks."""
        if self.mesh is not None and self.world_size > 1:
            dist.all_reduce(values)
        return values


@contextmanager
def claim(config: Config, *, memory_limit_bytes: int) -> Iterator[Device]:
    """Take the device of this rank under its limit; give it back at the end.

    Rank and world size come from torchrun's environment variables, and are 0 and 1 without.
    Tensors that live in the block are booked by an exact account, which raises
    torch.OutOfMemoryError after the operation that passes the limit.

    Raises:
        ConfigError: if the strategy cannot serve this number of ranks.
    """
    if config.trainer.device != "cpu":
        raise ConfigError(
            "trainer.device=cuda does not work in this version; use trainer.device=cpu"
        )
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if config.engine.strategy == "single" and world_size > 1:
        raise ConfigError(
            f"engine.strategy=single serves one rank, not {world_size}; use engine.strategy=fsdp2"
        )
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
    mesh = None
    if config.engine.strategy == "fsdp2":
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (world_size,))
    account = MemoryAccount(memory_limit_bytes)
    try:
        with account:
            yield Device(
                torch_device=torch.device("cpu"),
                rank=rank,
                world_size=world_size,
                limit_bytes=memory_limit_bytes,
                mesh=mesh,
                account=account,
            )
    finally:
        if mesh is not None:
            dist.destroy_process_group()
