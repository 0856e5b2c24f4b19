"""The device of one rank: claimed once, capped at its limit, asked for its peaks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autobatch.config import Config
from autobatch.engine.account import MemoryAccount
from autobatch.engine.allocator import CudaMemory
from autobatch.engine.products import usable_products
from autobatch.errors import ConfigError
from autobatch.hardware.present import present_gpus


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
    memory: MemoryAccount | CudaMemory
    is_simulated: bool = False  # one rank stands for `world_size`: collectives do nothing

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Book peaks under a phase: build, forward, backward, optimizer, save."""
        return self.memory.phase(name)

    def reset_peaks(self) -> None:
        """Start the peaks anew from what is held now."""
        self.memory.reset_peaks()

    def release_cache(self) -> None:
        """Forget cached memory between two measurements; never between training steps."""
        if isinstance(self.memory, CudaMemory):
            self.memory.release_cache()

    def memory_use(self) -> MemoryUse:
        """Return the peaks since the last reset. On the CPU reserved equals allocated."""
        if isinstance(self.memory, CudaMemory):
            return MemoryUse(
                peak_allocated_bytes=self.memory.peak_allocated_bytes,
                peak_reserved_bytes=self.memory.peak_reserved_bytes,
                non_torch_bytes=self.memory.non_torch_bytes(),
                num_alloc_retries=self.memory.num_alloc_retries,
                phase_peaks=dict(self.memory.phase_peaks),
            )
        return MemoryUse(
            peak_allocated_bytes=self.memory.peak_bytes,
            peak_reserved_bytes=self.memory.peak_bytes,
            non_torch_bytes=0,
            num_alloc_retries=0,
            phase_peaks=dict(self.memory.phase_peaks),
        )

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a small tensor over all ranks."""
        if self.mesh is not None and self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_counts(self, *counts: int) -> tuple[int, ...]:
        """Return each count summed over all ranks; one rank needs no device for it."""
        if self.world_size == 1:
            return counts
        return tuple(self.sum_over_ranks(torch.tensor(counts, device=self.torch_device)).tolist())

    def max_over_ranks(self, value: int) -> int:
        """Return the largest value of all ranks; all of them must ask."""
        if self.mesh is None or self.world_size == 1:
            return value
        largest = torch.tensor(value, device=self.torch_device)  # () int64
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())

    def mark(self) -> torch.cuda.Event | float:
        """Return a point in this rank's time, without waiting for the device."""
        if self.torch_device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait until the device has done what was asked of it."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)


def secs_between(earlier: torch.cuda.Event | float, later: torch.cuda.Event | float) -> float:
    """Return the seconds between two marks; the device must have passed the later one."""
    if isinstance(earlier, float):
        assert isinstance(later, float)
        return later - earlier
    assert isinstance(later, torch.cuda.Event)
    return float(earlier.elapsed_time(later)) / 1000


@contextmanager
def claim(
    config: Config,
    *,
    memory_limit_bytes: int,
    simulated_ranks: int | None = None,
) -> Iterator[Device]:
    """Take the device of this rank under its limit; give it back at the end.

    Rank and world size come from torchrun's environment variables, and are 0 and 1 without.
    CUDA: what is free on the card is read, context and communicator are made, torch is capped at
    what the limit leaves. CPU: an exact account of the tensors that live in
    the block raises torch.OutOfMemoryError after the operation that passes the limit.
    `simulated_ranks`: this process stands for rank 0 of so many under FSDP2; its memory is real,
    its collectives do nothing.

    Raises:
        ConfigError: if the strategy cannot serve this number of ranks, or there is no such device.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    world_size = simulated_ranks or world_size
    if config.engine.strategy == "single" and world_size > 1:
        raise ConfigError(
            f"engine.strategy=single serves one rank, not {world_size}; use engine.strategy=fsdp2"
        )
    if config.trainer.deterministic:
        torch.use_deterministic_algorithms(True)
    # asked before CUDA is: what others hold on the card is none of this process's bytes
    cards = present_gpus() if config.trainer.device == "cuda" else ()
    device = _torch_device(config.trainer.device)
    mesh = None
    if config.engine.strategy == "fsdp2":
        _join(device, world_size, is_simulated=simulated_ranks is not None)
        mesh = init_device_mesh(device.type, (world_size,))
    try:
        memory: MemoryAccount | CudaMemory
        scope = ExitStack()
        if device.type == "cuda":
            if mesh is not None and world_size > 1 and simulated_ranks is None:
                dist.all_reduce(torch.zeros(1, device=device))  # makes the communicator
            total = torch.cuda.get_device_properties(device).total_memory
            free = cards[device.index].free_bytes if device.index < len(cards) else total
            memory = CudaMemory(
                device, limit_bytes=memory_limit_bytes, free_before_bytes=min(free, total)
            )
        else:
            memory = MemoryAccount(memory_limit_bytes)
            scope.enter_context(usable_products())
            scope.enter_context(memory)
        with scope:
            yield Device(
                torch_device=device,
                rank=rank,
                world_size=world_size,
                limit_bytes=memory_limit_bytes,
                mesh=mesh,
                memory=memory,
                is_simulated=simulated_ranks is not None,
            )
    finally:
        if mesh is not None:
            dist.destroy_process_group()


def _torch_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "trainer.device=cuda, but torch finds no CUDA device here; use trainer.device=cpu, "
            "or look at CUDA_VISIBLE_DEVICES"
        )
    index = int(os.environ.get("LOCAL_RANK", 0))
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {index} of this host has no GPU of its own, {torch.cuda.device_count()} are "
            "visible; use fewer ranks"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _join(device: torch.device, world_size: int, *, is_simulated: bool) -> None:
    """Join the process group; a group of one needs no rendezvous."""
    if is_simulated:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        return
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
