"""How many bytes a process may take on the CPU or the card it runs on.

A container often holds less than the host: its control groups (version 1 or 2) are read too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autobatch.errors import ConfigError
from autobatch.hardware.present import PresentGpu
from autobatch.records import GpuSpec
from autobatch.units import format_gib

MEMINFO = Path("/proc/meminfo")
SELF_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
# total_memory of one card moves with the driver: an A100 40GB shows 39.39 to 39.59 GiB, a T4
# 14.56 to 14.76 GiB (public logs, read 2026-12-01). Within it two cards count as equal.
DRIVER_FRACTION = 0.015


def available_memory_bytes(
    *, meminfo: Path = MEMINFO, self_cgroup: Path = SELF_CGROUP, cgroup_root: Path = CGROUP_ROOT
) -> int:
    """Return the memory that this process can still take, before the host or a container kills.

    The least of MemAvailable and, for each control group up to the root, limit - usage +
    inactive file cache (which the kernel drops first; it is counted as usage).

    Raises:
        ConfigError: if the system tells no available memory.
    """
    rooms = [
        _room_bytes(folder)
        for folder in cgroup_folders("memory", self_cgroup=self_cgroup, cgroup_root=cgroup_root)
    ]
    for line in _text(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            rooms.append(int(line.split()[1]) * 1024)
    known = [room for room in rooms if room is not None]
    if not known:
        raise ConfigError(
            f"{meminfo} tells no MemAvailable, so the memory here is unknown; give --memory-limit"
        )
    return min(known)


def cpu_memory_limit(
    *,
    num_local_ranks: int,
    memory_limit_bytes: int | None,
    headroom_bytes: int = 0,
    named: GpuSpec | None = None,
    available_bytes: int | None = None,
) -> int:
    """Return the bytes one rank may take on the CPU, which may step under a named card's bytes.

    min(named card, this rank's share) - headroom, and at most `memory_limit_bytes`.
    `available_bytes` is what is free for all ranks, None: measured here.

    Raises:
        ConfigError: if nothing is left, or a rank's share is below the named card.
    """
    available = available_memory_bytes() if available_bytes is None else available_bytes
    whole = available // num_local_ranks
    source = f"{format_gib(available)} available / {num_local_ranks} local ranks"
    if named is not None:
        if named.visible_memory_bytes > whole and memory_limit_bytes is None:
            raise ConfigError(
                f"--gpu {named.name} has {format_gib(named.visible_memory_bytes)}, one rank here "
                f"{format_gib(whole)} ({source}); name a smaller card, or add --memory-limit"
            )
        whole = min(whole, named.visible_memory_bytes)
    share = whole - headroom_bytes
    if headroom_bytes:
        source += f" - {format_gib(headroom_bytes)} headroom"
    if share <= 0:
        raise ConfigError(
            f"a memory limit of {format_gib(share)} ({source}) leaves nothing to train in; "
            "lower --headroom or --num-gpus"
        )
    if memory_limit_bytes is None:
        return share
    if memory_limit_bytes <= 0:
        raise ConfigError(f"memory limit {memory_limit_bytes} is not positive; give 1 byte or more")
    return min(share, memory_limit_bytes)


def gpu_memory_limit(
    *,
    card: PresentGpu,
    named: GpuSpec | None,
    memory_limit_bytes: int | None,
    headroom_bytes: int = 0,
) -> int:
    """Return the bytes one process may take on a card here, which may stand in for a named one.

    min(named card, card here) - used by others - headroom, and at most `memory_limit_bytes`.
    It covers all of the process: torch's allocator and what lies outside it.

    Raises:
        ConfigError: if nothing is left, or the named card is larger than the one here.
    """
    here = card.total_bytes
    whole = here if named is None else min(named.visible_memory_bytes, here)
    if named is not None and named.visible_memory_bytes * (1 - DRIVER_FRACTION) > here:
        raise ConfigError(
            f"--gpu {named.name} has {format_gib(named.visible_memory_bytes)}, the "
            f"{card.vendor_name} here {format_gib(here)}, and only a card at least as large can "
            "stand in for it; name a smaller card, or run on a larger one"
        )
    if memory_limit_bytes is not None and memory_limit_bytes <= 0:
        raise ConfigError(f"memory limit {memory_limit_bytes} is not positive; give 1 byte or more")
    share = whole - card.used_by_others_bytes - headroom_bytes
    if share <= 0:
        raise ConfigError(
            f"a memory limit of {format_gib(share)} ({format_gib(whole)} - "
            f"{format_gib(card.used_by_others_bytes)} used by others - "
            f"{format_gib(headroom_bytes)} headroom on GPU {card.index}) leaves nothing to train "
            "in; lower --headroom, end the other processes or choose another GPU by "
            "CUDA_VISIBLE_DEVICES"
        )
    return share if memory_limit_bytes is None else min(share, memory_limit_bytes)


def cgroup_folders(
    controller: str, *, self_cgroup: Path = SELF_CGROUP, cgroup_root: Path = CGROUP_ROOT
) -> Iterator[Path]:
    """Yield the control-group folders over this process for one controller, innermost first.

    A path that a container's mount does not show is left out; its root is the container itself.
    """
    for line in _text(self_cgroup).splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" and not names:
            mount = cgroup_root  # version 2
        elif controller in names.split(","):
            mount = next(
                (cgroup_root / n for n in (names, controller) if _is_dir(cgroup_root / n)),
                cgroup_root / controller,
            )
        else:
            continue
        folder = mount / path.lstrip("/")
        while True:
            if _is_dir(folder):
                yield folder
            if folder == mount or mount not in folder.parents:
                break
            folder = folder.parent


def _room_bytes(folder: Path) -> int | None:
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            cache = next(
                (
                    int(line.split()[1])
                    for line in _text(folder / "memory.stat").splitlines()
                    if line.startswith(f"{cache_name} ")
                ),
                0,
            )
            return max(0, limit - usage + cache)
    return None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
