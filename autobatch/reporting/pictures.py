"""Pictures of token lengths, drawn in text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group
from rich.text import Text

from autobatch.records import LengthProfile
from autobatch.reporting.tables import profile_advice, profile_facts

_BAR_COLUMNS = 44
_MOST_BINS = 16
_EIGHTHS = "▏▎▍▌▋▊▉█"


def profile_table(profile: LengthProfile) -> Group:
    """Return facts, histogram, the cost of each max_length, the advice, the warnings."""
    return Group(
        profile_facts(profile),
        Text("\nTokens a row (logarithmic steps)", style="bold"),
        LengthHistogram(pairs=profile.histogram),
        Text(""),
        profile_advice(profile),
    )


@dataclass(frozen=True, kw_only=True)
class LengthHistogram:
    """A drawing of (length_tokens, count) pairs on a logarithmic axis."""

    pairs: tuple[tuple[int, int], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        bins = log_bins(self.pairs)
        total, most = sum(b[2] for b in bins), max(b[2] for b in bins)
        width = len(str(bins[-1][1]))
        room = max(8, min(_BAR_COLUMNS, options.max_width - 2 * width - 24))
        for low, high, count in bins:
            drawn = _bar(count / most, room, ascii_only=options.ascii_only)
            yield Text.assemble(
                f"{low:>{width}} - {high:>{width}}  ",
                (f"{drawn:<{room}}", "cyan"),
                f" {count:>10,} {count / total:>6.1%}",
                no_wrap=True,
            )


def log_bins(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (low, high, count) bins, both ends inside, at most 17, gaps left at zero.

    Bins widen by a factor of the root of 2 where that gives so few, else by 2, 4, ...
    """
    lowest, highest = pairs[0][0], pairs[-1][0]
    octaves = math.log2(max(highest, 1) / max(lowest, 1)) + 1
    exponent = 0.5
    while octaves / exponent > _MOST_BINS:
        exponent *= 2
    first = math.floor(math.log2(max(lowest, 1)) / exponent)
    edges = [0 if lowest == 0 else round(2 ** (first * exponent))]
    while edges[-1] <= highest:
        first += 1
        edges.append(max(edges[-1] + 1, round(2 ** (first * exponent))))
    counts = [0] * (len(edges) - 1)
    place = 0
    for length, count in pairs:
        while length >= edges[place + 1]:
            place += 1
        counts[place] += count
    return [(edges[i], edges[i + 1] - 1, count) for i, count in enumerate(counts)]


def _bar(fraction: float, columns: int, *, ascii_only: bool) -> str:
    if not fraction:
        return ""
    if ascii_only:
        return "#" * max(1, round(fraction * columns))
    whole, rest = divmod(max(1, round(fraction * columns * 8)), 8)
    return _EIGHTHS[-1] * whole + (_EIGHTHS[rest - 1] if rest else "")
