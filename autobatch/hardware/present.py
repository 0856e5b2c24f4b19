"""The CUDA devices that are visible to this process, asked of NVML without touching CUDA."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from autobatch.hardware.named import find_gpu
from autobatch.records import GpuSpec

T = TypeVar("T")


class Nvml(Protocol):
    """What is asked of NVML: the functions of nvidia-ml-py, under their own names."""

    NVMLError: type[Exception]
    NVML_CLOCK_SM: int
    nvmlMemory_v2: int

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Any: ...
    def nvmlDeviceGetUUID(self, handle: Any, /) -> str: ...
    def nvmlDeviceGetName(self, handle: Any, /) -> str: ...
    def nvmlDeviceGetPciInfo(self, handle: Any, /) -> Any: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None, /) -> Any: ...
    def nvmlDeviceGetNumGpuCores(self, handle: Any, /) -> int: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: Any, type: int, /) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: Any, /) -> Sequence[int]: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, /) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class PresentGpu:
    """A device that CUDA would show to this process."""

    index: int  # CUDA's number for it here
    uuid: str  # GPU-... or MIG-...
    vendor_name: str
    total_bytes: int  # what CUDA programs can take: the driver's own reserve is left out
    free_bytes: int
    used_by_others_bytes: int  # in use now; this process has made nothing on the device yet
    mig: bool  # a slice of a card


@dataclass(frozen=True, kw_only=True)
class _HostCard:
    pci_bus_id: str
    speed: int  # cores x clock, 0 if unknown
    device: PresentGpu
    has_mig: bool
    slices: tuple[PresentGpu, ...]


def present_gpus(
    *, nvml: Nvml | None = None, environ: Mapping[str, str] | None = None
) -> tuple[PresentGpu, ...]:
    """Return the visible devices in CUDA's order; none without a driver or a card.

    CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are obeyed as CUDA does. Call it before this
    process uses CUDA itself: what is in use then counts as used by others.
    """
    with _session(nvml) as library:
        if library is None:
            return ()
        cards = _host_cards(library)
    settings = os.environ if environ is None else environ
    if settings.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        cards = _fastest_first(cards)
    devices = _visible(cards, settings.get("CUDA_VISIBLE_DEVICES"))
    return tuple(replace(device, index=index) for index, device in enumerate(devices))


def driver_version(*, nvml: Nvml | None = None) -> str | None:
    """Return the version of the NVIDIA driver, None without one."""
    with _session(nvml) as library:
        return None if library is None else _ask(library, library.nvmlSystemGetDriverVersion)


def named_of(vendor_name: str) -> GpuSpec | None:
    """Return the named card of what NVML calls a device; None for a MIG slice or an unknown one."""
    return find_gpu(vendor_name)


# ---- NVML ------------------------------------------------------------------


@contextmanager
def _session(nvml: Nvml | None) -> Iterator[Nvml | None]:
    library = nvml if nvml is not None else _pynvml()
    if library is None:
        yield None
        return
    try:
        library.nvmlInit()
    except library.NVMLError:  # no driver, or one that does not answer
        yield None
        return
    try:
        yield library
    finally:
        _ask(library, library.nvmlShutdown)


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _ask(library: Nvml, question: Callable[..., T], *arguments: Any) -> T | None:
    """Return NVML's answer, None where the card or driver has none."""
    try:
        return question(*arguments)
    except library.NVMLError:
        return None


def _host_cards(library: Nvml) -> list[_HostCard]:
    """Return the host's cards by PCI bus id, which is what CUDA calls PCI_BUS_ID order."""
    cards = []
    for index in range(_ask(library, library.nvmlDeviceGetCount) or 0):
        handle = _ask(library, library.nvmlDeviceGetHandleByIndex, index)
        device = None if handle is None else _device(library, handle, mig=False)
        if device is None:  # lost from the bus, or another user's
            continue
        pci = _ask(library, library.nvmlDeviceGetPciInfo, handle)
        cores = _ask(library, library.nvmlDeviceGetNumGpuCores, handle)
        clock = _ask(library, library.nvmlDeviceGetMaxClockInfo, handle, library.NVML_CLOCK_SM)
        mig_mode = _ask(library, library.nvmlDeviceGetMigMode, handle)
        has_mig = mig_mode is not None and mig_mode[0] == 1
        cards.append(
            _HostCard(
                pci_bus_id="" if pci is None else str(pci.busId),
                speed=(cores or 0) * (clock or 0),
                device=device,
                has_mig=has_mig,
                slices=_slices(library, handle) if has_mig else (),
            )
        )
    return sorted(cards, key=lambda card: card.pci_bus_id)


def _slices(library: Nvml, handle: Any) -> tuple[PresentGpu, ...]:
    found = []
    for index in range(_ask(library, library.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        child = _ask(library, library.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        device = None if child is None else _device(library, child, mig=True)
        if device is not None:
            found.append(device)
    return tuple(found)


def _device(library: Nvml, handle: Any, *, mig: bool) -> PresentGpu | None:
    uuid = _ask(library, library.nvmlDeviceGetUUID, handle)
    name = _ask(library, library.nvmlDeviceGetName, handle)
    # version 2 tells the driver's reserve apart; older drivers count it as used
    memory = _ask(library, library.nvmlDeviceGetMemoryInfo, handle, library.nvmlMemory_v2)
    if memory is None:
        memory = _ask(library, library.nvmlDeviceGetMemoryInfo, handle)
    if uuid is None or name is None or memory is None:
        return None
    return PresentGpu(
        index=-1,
        uuid=uuid,
        vendor_name=name,
        total_bytes=int(memory.total) - int(getattr(memory, "reserved", 0)),
        free_bytes=int(memory.free),
        used_by_others_bytes=int(memory.used),
        mig=mig,
    )


# ---- what CUDA shows -------------------------------------------------------


def _fastest_first(cards: list[_HostCard]) -> list[_HostCard]:
    """Put the fastest card first, the others by bus: CUDA's default, FASTEST_FIRST.

    CUDA does not say how it guesses the fastest; cores x clock is ours. Among equal cards the
    bus decides, as there. On a host with mixed cards CUDA_DEVICE_ORDER=PCI_BUS_ID is certain.
    """
    fastest = max(cards, key=lambda card: card.speed, default=None)
    return sorted(cards, key=lambda card: card is not fastest)


def _visible(cards: list[_HostCard], chosen: str | None) -> list[PresentGpu]:
    """Return what CUDA_VISIBLE_DEVICES leaves: all when unset, none when empty.

    The first word that names no device ends the list; a device named twice empties it. The
    first word's kind (number, GPU-, MIG-) is the kind of all. Where a MIG slice is visible,
    CUDA shows the first one alone, and of a card in MIG mode nothing but slices (NVIDIA MIG user
    guide, "CUDA device enumeration").
    """
    picks = range(len(cards)) if chosen is None else _picked(cards, chosen)
    devices: list[PresentGpu] = []
    for pick in picks:
        if isinstance(pick, PresentGpu):
            devices.append(pick)
        elif cards[pick].has_mig:
            devices += cards[pick].slices
        else:
            devices.append(cards[pick].device)
    first_slice = next((device for device in devices if device.mig), None)
    return devices if first_slice is None else [first_slice]


def _picked(cards: list[_HostCard], chosen: str) -> list[int | PresentGpu]:
    chosen = chosen.strip()
    pool: dict[str, int | PresentGpu] = {}
    if chosen.startswith("MIG-"):
        pool = {part.uuid: part for card in cards for part in card.slices}
    elif chosen.startswith("GPU-"):
        pool = {card.device.uuid: number for number, card in enumerate(cards)}
    picks: list[int | PresentGpu] = []
    for word in chosen.split(","):
        pick = _by_uuid(pool, word.strip()) if pool else _by_number(len(cards), word.strip())
        if pick is None:
            break
        if pick in picks:
            return []
        picks.append(pick)
    return picks


def _by_uuid(pool: Mapping[str, int | PresentGpu], word: str) -> int | PresentGpu | None:
    """Return the one device whose UUID begins so."""
    matches = [device for uuid, device in pool.items() if word and uuid.startswith(word)]
    return matches[0] if len(matches) == 1 else None


def _by_number(num_cards: int, word: str) -> int | None:
    """Return the number a word begins with, as C's strtoul reads it: `1x` is 1."""
    digits = word.removeprefix("+")
    end = next((i for i, sign in enumerate(digits) if sign not in "0123456789"), len(digits))
    number = int(digits[:end]) if end else num_cards
    return number if number < num_cards else None
