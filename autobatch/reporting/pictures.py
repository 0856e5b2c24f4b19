"""Pictures of token lengths, drawn in text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group
from rich.text import Text

from autobatch.records import LengthProfile
from autobatch.reporting.profile_tables import profile_advice, profile_facts
from autobatch.reporting.scales import Bin, log_bins

_BAR_COLUMNS = 44
_FAIR_BAR = 12  # below, the marks give up their place for the bars, then the shares, the counts
_SHORT_BAR = 6  # below, a bar is named by its lower end alone
_EIGHTHS = "▏▎▍▌▋▊▉█"


def profile_table(profile: LengthProfile) -> Group:
    """Return facts, histogram, the cost of each max_length, the advice, the warnings."""
    length = profile.length
    marks = {"p50": length.p50, "p95": length.p95, "p99": length.p99, "max": length.max}
    return Group(
        profile_facts(profile),
        Text("\nTokens a row (logarithmic steps)", style="bold"),
        LengthHistogram(pairs=profile.histogram, marks=marks),
        Text(""),
        profile_advice(profile),
    )


@dataclass(frozen=True, kw_only=True)
class LengthHistogram:
    """A drawing of (length_tokens, count) pairs on a logarithmic axis, for any width.

    `marks` names lengths; each stands beside the bar it falls into.
    """

    pairs: tuple[tuple[int, int], ...]
    marks: Mapping[str, int] = field(default_factory=dict)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Text]:
        bins = log_bins(self.pairs)
        if not bins:
            yield Text("no rows")
            return
        most = max(count for *_, count in bins)
        columns = self._columns(bins)
        labels = columns.pop(0)
        if options.max_width < len(labels[0]) + _SHORT_BAR:
            labels = [f"{low:>{len(str(bins[-1][0]))}}" for low, *_ in bins]
        room = options.max_width - len(labels[0]) - 1
        while columns and room - sum(map(_width, columns)) < _FAIR_BAR:
            columns.pop()
        bar_columns = max(1, min(_BAR_COLUMNS, room - sum(map(_width, columns))))
        for i, (_, _, count) in enumerate(bins):
            drawn = _bar(count / most, bar_columns, ascii_only=options.ascii_only)
            line = Text.assemble(f"{labels[i]} ", (f"{drawn:<{bar_columns}}", "cyan"))
            for column in columns:
                line.append(f" {column[i]}")
            line.rstrip()
            line.no_wrap = True
            yield line

    def _columns(self, bins: list[Bin]) -> list[list[str]]:
        """Return the words of each column, as wide as their widest: ranges, counts, ..."""
        total = sum(count for *_, count in bins)
        width = len(str(bins[-1][1]))
        named = [
            " ".join(name for name, length in self.marks.items() if low <= length <= high)
            for low, high, _ in bins
        ]
        counts = [f"{count:,.0f}" for *_, count in bins]
        most_digits, widest = max(map(len, counts)), max(map(len, named))
        columns = [
            [f"{_span(low, high, width)} " for low, high, _ in bins],
            [f"{count:>{most_digits}}" for count in counts],
            [f"{count / total:>6.1%}" for *_, count in bins],
        ]
        return [*columns, [f" {name:<{widest}}" for name in named]] if widest else columns


def _span(low: int, high: int, width: int) -> str:
    return f"{low:>{width}} - {high:>{width}}" if high > low else f"{high:>{2 * width + 3}}"


def _width(column: list[str]) -> int:
    return len(column[0]) + 1


def _bar(fraction: float, columns: int, *, ascii_only: bool) -> str:
    if not fraction:
        return ""
    if ascii_only:
        return "#" * max(1, round(fraction * columns))
    whole, rest = divmod(max(1, round(fraction * columns * 8)), 8)
    return _EIGHTHS[-1] * whole + (_EIGHTHS[rest - 1] if rest else "")
