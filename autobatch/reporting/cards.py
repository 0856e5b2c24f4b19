"""Tables of named cards, of cards that are here."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from autobatch.hardware.present import PresentGpu
from autobatch.records import GpuSpec
from autobatch.reporting.tables import grid
from autobatch.units import GIB, format_gib

NO_GPU = "no GPU is visible to this process: no driver, no card, or CUDA_VISIBLE_DEVICES hides it"


def named_gpus_table(specs: Sequence[GpuSpec]) -> Group:
    """Return the named cards with what they hold and how fast they are."""
    heads = ("name", "nvidia-smi says", "memory GiB", "bf16 TFLOP/s", "memory GB/s", "link GB/s")
    table = grid(*heads, "tested", left=2)
    for spec in specs:
        table.add_row(
            spec.name,
            spec.vendor_name,
            f"{spec.visible_memory_bytes / GIB:.2f}",
            _rate(spec.bf16_flops_per_sec, 1e12),
            _rate(spec.memory_bytes_per_sec, 1e9),
            _rate(spec.interconnect_bytes_per_sec, 1e9),
            "yes" if spec.tested else "no",
        )
    for column in table.columns[:2]:
        column.no_wrap = True
    return Group(
        Text("Named cards", style="bold"),
        table,
        Text(
            "memory: visible to torch; rates: the vendor's; link: NVLink or PCIe, both directions"
        ),
    )


def present_gpus_table(
    cards: Sequence[PresentGpu], matches: Sequence[str | None], driver: str | None
) -> Group:
    """Return the visible devices in CUDA's order; `matches` names the card of each."""
    head = Text(f"Here (driver {driver})" if driver else "Here", style="bold")
    if not cards:
        return Group(head, Text(NO_GPU))
    lines: list[RenderableType] = [
        Text(
            f"GPU {card.index}  {card.vendor_name}{' (MIG slice)' if card.mig else ''}, "
            f"named card: {match or 'unknown'}\n"
            f"       {format_gib(card.total_bytes)}, {format_gib(card.free_bytes)} free, "
            f"{format_gib(card.used_by_others_bytes)} used by others\n       {card.uuid}"
        )
        for card, match in zip(cards, matches, strict=True)
    ]
    return Group(head, *lines)


def _rate(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:,.6g}"
