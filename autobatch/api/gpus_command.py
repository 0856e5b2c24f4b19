"""`autobatch gpus`: the cards known by name beside those that are here."""

from __future__ import annotations

from dataclasses import dataclass

from autobatch.hardware.named import all_gpus
from autobatch.hardware.present import PresentGpu, driver_version, named_of, present_gpus
from autobatch.records import GpuSpec


@dataclass(frozen=True, kw_only=True)
class GpusReport:
    """Named cards, and the devices visible to this process in CUDA's order."""

    named: tuple[GpuSpec, ...]
    present: tuple[PresentGpu, ...]
    matches: tuple[str | None, ...]  # the named card of each present one
    driver: str | None


def gpus() -> GpusReport:
    """Return the named cards and what is here; without a driver nothing is here.

    Raises:
        AutobatchError: if the shipped records are missing or damaged.
    """
    present = present_gpus()
    specs = [named_of(card.vendor_name) for card in present]
    return GpusReport(
        named=all_gpus(),
        present=present,
        matches=tuple(None if spec is None else spec.name for spec in specs),
        driver=driver_version(),
    )
