"""Where a command makes its steps: the device, the ranks, the bytes of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from autobatch.api.inputs import Talk
from autobatch.errors import ConfigError
from autobatch.hardware.environment import describe
from autobatch.hardware.limit import cpu_memory_limit, gpu_memory_limit
from autobatch.hardware.named import named_gpu
from autobatch.hardware.present import named_of, present_gpus
from autobatch.jobs import exclusive
from autobatch.probing.runner import ProbeRunner
from autobatch.units import format_gib, parse_size


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is stepped on, and what it stands for."""

    device: str  # cpu | cuda
    gpu: str  # the name the verdict is for: cpu, a named card, or the card's own name
    stand_in_for: str | None  # a named card whose limit is kept on another one
    num_ranks: int  # real processes
    simulated_ranks: int | None  # one process stands for so many
    limit_bytes: int  # of one rank
    environment: dict[str, Any]

    @property
    def data_parallel_size(self) -> int:
        """The ranks that the verdict is for."""
        return self.simulated_ranks or self.num_ranks


def find_machine(
    *,
    device: str | None,
    gpu: str | None,
    num_gpus: int,
    memory_limit: str | int | None,
    headroom: str | int | None,
    talk: Talk,
) -> Machine:
    """Return the machine that flags ask for, of what is here; say what stands in for what.

    Raises:
        ConfigError: if the device is not here, a name is unknown, or the limit cannot be kept.
    """
    if num_gpus < 1:
        raise ConfigError(f"--num-gpus {num_gpus} is below 1; use 1 or more")
    if device not in (None, "cpu", "cuda"):
        raise ConfigError(f"--device {device} is unknown; use cpu or cuda")
    named = None if gpu is None else named_gpu(gpu)
    limit_bytes = None if memory_limit is None else parse_size(memory_limit)
    headroom_bytes = 0 if headroom is None else parse_size(headroom, least=0)
    cards = () if device == "cpu" else present_gpus()
    if device is None and not cards:
        raise ConfigError(
            "there is no GPU here, and predicting without one is not in this version, so nothing "
            "was measured; add --device cpu to step on the CPU under an exact account of bytes"
        )
    if device == "cuda" and not cards:
        raise ConfigError(
            "--device cuda, but no GPU is visible here (look at CUDA_VISIBLE_DEVICES and "
            "nvidia-smi); use --device cpu"
        )
    if not cards:
        limit = cpu_memory_limit(
            num_local_ranks=num_gpus,
            memory_limit_bytes=limit_bytes,
            headroom_bytes=headroom_bytes,
            named=named,
        )
        _tell_lowered(limit_bytes, limit, talk)
        if named is not None:
            talk(
                f"stepping on the CPU under the {format_gib(limit)} of {named.name}: "
                "memory of CUDA kernels and speed are not those of the card"
            )
        return Machine(
            device="cpu",
            gpu="cpu",
            stand_in_for=None if named is None else named.name,
            num_ranks=num_gpus,
            simulated_ranks=None,
            limit_bytes=limit,
            environment=describe(device="cpu"),
        )
    card = cards[0]
    here = named_of(card.vendor_name)
    limit = min(
        gpu_memory_limit(
            card=one, named=named, memory_limit_bytes=limit_bytes, headroom_bytes=headroom_bytes
        )
        for one in cards[: 1 if num_gpus > len(cards) else num_gpus]
    )
    _tell_lowered(limit_bytes, limit, talk)
    stands_in = named is not None and (here is None or here.name != named.name)
    if stands_in:
        assert named is not None
        talk(
            f"{card.vendor_name} stands in for {named.name}: torch is capped at its "
            f"{format_gib(limit)}; memory is real, speed is this card's"
        )
    simulated = num_gpus if num_gpus > len(cards) else None
    if simulated is not None:
        talk(
            f"one GPU stands for {num_gpus} (FSDP2, fake process group): memory is real, "
            "communication is not timed"
        )
    if card.used_by_others_bytes:
        talk(f"others hold {format_gib(card.used_by_others_bytes)} of this card: left to them")
    name = here.name if here is not None else card.vendor_name
    return Machine(
        device="cuda",
        gpu=named.name if named is not None else name,
        stand_in_for=named.name if stands_in and named is not None else None,
        num_ranks=1 if simulated is not None else num_gpus,
        simulated_ranks=simulated,
        limit_bytes=limit,
        environment=describe(device="cuda"),
    )


@contextmanager
def prober_on(machine: Machine, config: DictConfig, out_dir: Path) -> Iterator[ProbeRunner]:
    """Yield what steps candidates on the machine; one at a time in an output folder.

    Raises:
        RunError: if another tune or probe is running there.
    """
    refusal = f"another tune or probe is running in {out_dir}; wait for it, or choose another --out"
    with (
        exclusive(out_dir / ".tune.lock", refusal=refusal),
        ProbeRunner(
            out_dir=out_dir / "probes",
            config=config,
            num_ranks=machine.num_ranks,
            memory_limit_bytes=machine.limit_bytes,
            environment=machine.environment,
            stand_in_for=machine.stand_in_for,
            simulated_ranks=machine.simulated_ranks,
        ) as runner,
    ):
        yield runner


def _tell_lowered(asked_bytes: int | None, limit_bytes: int, talk: Talk) -> None:
    if asked_bytes is not None and limit_bytes < asked_bytes:
        talk(
            f"the limit is {format_gib(limit_bytes)}: of the {format_gib(asked_bytes)} asked for, "
            "that is what one rank has here"
        )
