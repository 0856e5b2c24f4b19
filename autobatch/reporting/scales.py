"""Arithmetic of pictures: bins, ticks and places on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autobatch.records import LengthStats

_MOST_BINS = 16  # rows of a histogram in a terminal, one more at most
_FINE_BINS = (20, 60)  # bars of a drawn histogram
_BINS_PER_OCTAVE = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_LENGTHS_PER_BIN = 4  # else rounding gives neighbours 1 and 2 lengths, and the bars a comb
_SHORT = 64  # tokens
_THINNEST_BAR = 0.004  # of the axis
_LEAST_OCTAVES = 0.3  # an axis of equal lengths still shows its surroundings

Bin = tuple[int, int, int]  # (low, high, count), both ends inside


@dataclass(frozen=True, kw_only=True)
class LogAxis:
    """A logarithmic axis from `low` to `high` tokens."""

    low: float
    high: float

    def place(self, tokens: float) -> float:
        """Return where a length lies: 0 at the left end, 1 at the right one, never outside."""
        share = math.log(max(tokens, self.low) / self.low) / math.log(self.high / self.low)
        return min(share, 1.0)

    def bar(self, low: int, high: int) -> tuple[float, float]:
        """Return the two ends of a bin's bar, never so thin that it cannot be seen."""
        left, right = self.place(low), self.place(high + 1)
        missing = max(0.0, _THINNEST_BAR - (right - left)) / 2
        return max(0.0, left - missing), min(1.0, right + missing)


def log_bins(pairs: Sequence[tuple[int, int]]) -> list[Bin]:
    """Return (low, high, count) bins, both ends inside, at most 17, gaps left at zero.

    Bins widen by a factor of the root of 2 where that gives so few, else by 2, 4, ...
    """
    if not pairs:
        return []
    lowest, highest = pairs[0][0], pairs[-1][0]
    octaves = math.log2(max(highest, 1) / max(lowest, 1)) + 1
    exponent = 0.5
    while octaves / exponent > _MOST_BINS:
        exponent *= 2
    return _binned(pairs, exponent)


def fine_bins(pairs: Sequence[tuple[int, int]]) -> list[Bin]:
    """Return 20 to 60 bins for a drawn histogram, as `log_bins` gives them; fewer where short.

    The width follows Freedman and Diaconis (1981, doi:10.1007/BF01025868, rule as quoted by
    others, checked 2026-12-01: 2 IQR / cube root of n) in octaves, wide enough that a
    common bin holds about 4 lengths. Where all lengths are below 64, each is a bin of its own.
    """
    if not pairs:
        return []
    if pairs[-1][0] < _SHORT:
        counts = dict(pairs)
        return [(n, n, counts.get(n, 0)) for n in range(pairs[0][0], pairs[-1][0] + 1)]
    lowest, highest = max(pairs[0][0], 1), max(pairs[-1][0], 1)
    span = max(math.log2(highest / lowest), _LEAST_OCTAVES)
    total = sum(count for _, count in pairs)
    spread = math.log2(max(share_at(pairs, 0.75), 1) / max(share_at(pairs, 0.25), 1))
    width = 2 * spread / max(total, 1) ** (1 / 3) or span / _FINE_BINS[1]
    width = min(max(width, span / _FINE_BINS[1]), span / _FINE_BINS[0])
    width = max(width, math.log2(1 + _LENGTHS_PER_BIN / max(share_at(pairs, 0.05), 4)))
    most = min(1.3 / width, _FINE_BINS[1] / span)
    per_octave = max((n for n in _BINS_PER_OCTAVE if n <= most), default=1)
    return _binned(pairs, 1 / per_octave)


def _binned(pairs: Sequence[tuple[int, int]], exponent: float) -> list[Bin]:
    """Return bins whose borders are whole multiples of `exponent` octaves, rounded."""
    lowest, highest = pairs[0][0], pairs[-1][0]
    if lowest == highest:
        return [(lowest, highest, pairs[0][1])]
    first = math.floor(math.log2(max(lowest, 1)) / exponent)
    edges = [0 if lowest == 0 else min(lowest, round(2 ** (first * exponent)))]
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


def share_at(pairs: Sequence[tuple[int, int]], share: float) -> int:
    """Return the smallest length with at least this share of the counts at or below it."""
    wanted = share * sum(count for _, count in pairs)
    seen = 0
    for length, count in pairs:
        seen += count
        if seen >= wanted:
            return length
    return pairs[-1][0]


def axis_of(lengths: Sequence[float]) -> LogAxis:
    """Return an axis that shows at least these lengths, with some room at both ends."""
    low, high = max(min(lengths), 0.5), max(*lengths, 1.0)
    octaves = math.log2(high / low)
    room = max(0.03 * octaves, 0.03, (_LEAST_OCTAVES - octaves) / 2)
    return LogAxis(low=low * 2**-room, high=high * 2**room)


def token_ticks(axis: LogAxis, *, width: float, letter: float) -> list[int]:
    """Return round lengths of the axis, as many as can be written side by side.

    They are powers of two, with halves between where there are few (128, 192, 256), or even
    steps on an axis of less than two octaves.
    """
    most = max(2, int(width / (letter * (len(f"{axis.high:,.0f}") + 2))))
    first, last = math.ceil(math.log2(axis.low)), math.floor(math.log2(axis.high))
    if last - first >= 2:
        step = -(-(last - first + 1) // most)
        powers = [2**power for power in range(max(first, 0), last + 1, step)]
        halves = [3 * 2**power for power in range(max(first - 2, 0), last)]
        both = sorted({*powers, *(n for n in halves if axis.low <= n <= axis.high)})
        return both if step == 1 and len(powers) <= 4 and len(both) <= most else powers
    return [
        round(tick)
        for tick in even_ticks(axis.high - axis.low, most=most, low=axis.low)
        if axis.low <= tick <= axis.high and tick == round(tick)
    ]


def even_ticks(span: float, *, most: int, low: float = 0.0) -> list[float]:
    """Return round values from `low` to `low + span`, at most `most`, in steps of 1, 2 or 5."""
    if span <= 0:
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    while span / step + 1 > most:  # 1, 2, 5, 10, ...
        step *= 2.5 if f"{step:e}".startswith("2") else 2.0
    first, last = math.ceil(low / step - 1e-9), math.floor((low + span) / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


@dataclass(frozen=True, kw_only=True)
class Label:
    """The words of a mark on an axis: the mark's line at `at`, the words from left to right."""

    name: str
    at: float
    left: float
    right: float

    @property
    def is_left(self) -> bool:
        """Whether the words stand left of their line."""
        return self.left < self.at


def labels_for(
    places: Mapping[str, float], *, letter: float, room: float, width: float
) -> list[Label]:
    """Return the labels of marks, ascending: right of their lines, left where that is crowded.

    It is crowded where the picture ends, or a label that stands left of its line would be met.
    """
    labels: list[Label] = []
    for name, at in sorted(places.items(), key=lambda mark: -mark[1]):
        wide = letter * len(name) + room
        end = labels[-1].at if labels and labels[-1].is_left else width
        left = at - wide if at + wide > end and at - wide > 0 else at
        labels.append(Label(name=name, at=at, left=left, right=left + wide))
    return labels[::-1]


def stagger(labels: Sequence[Label], *, gap: float) -> list[int]:
    """Return a row for each label, 0 the lowest: none touches another or another's line.

    Lines rise from below to their label's row, so a label lies above every line it spans.
    """
    order = sorted(range(len(labels)), key=lambda i: -labels[i].at)
    order = [i for i in order if not labels[i].is_left] + [
        i for i in reversed(order) if labels[i].is_left
    ]
    rows: dict[int, int] = {}
    for i in order:
        label, row = labels[i], 0
        while any(
            (row == other_row and _touch(label, labels[j], gap))
            or (row <= other_row and label.left < labels[j].at < label.right)
            for j, other_row in rows.items()
        ):
            row += 1
        rows[i] = row
    return [rows[i] for i in range(len(labels))]


def _touch(one: Label, other: Label, gap: float) -> bool:
    return one.left < other.right + gap and other.left < one.right + gap


def length_marks(length: LengthStats) -> dict[str, int]:
    """Return the marked lengths by their labels: `p50 184`, equal ones as `p99, max 64`."""
    names: dict[int, list[str]] = {}
    for name in ("p50", "p95", "p99", "max"):
        names.setdefault(getattr(length, name), []).append(name)
    return {f"{', '.join(same)} {tokens:,}": tokens for tokens, same in names.items()}
