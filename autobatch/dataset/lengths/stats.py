"""Describe a set of token lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autobatch.records import LengthStats

_LEAST_SHARE = 0.1  # of the rows, for a group to count
_LEAST_FACTOR = 4  # between the medians of two groups
_MOST_BETWEEN = 0.05  # share of the rows in the middle third between the medians (log scale)
_LEAST_ROWS = 20  # fewer rows make no groups


@dataclass(frozen=True, kw_only=True)
class TwoGroups:
    """Rows that are either short or long, with hardly any between."""

    short_share: float
    short_tokens: int  # median of the short rows
    long_share: float
    long_tokens: int  # median of the long rows


def length_stats(lengths: np.ndarray) -> LengthStats:
    """Return mean, extremes and percentiles of int (N,) lengths, N >= 1.

    A percentile is the smallest length with at least that share of samples at or below it.
    """
    p50, p90, p95, p99 = np.percentile(lengths, [50, 90, 95, 99], method="inverted_cdf")
    return LengthStats(
        mean=float(np.mean(lengths)),
        min=int(np.min(lengths)),
        p50=int(p50),
        p90=int(p90),
        p95=int(p95),
        p99=int(p99),
        max=int(np.max(lengths)),
    )


def length_histogram(lengths: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return every length that occurs with its count, ascending; nothing is binned."""
    values, counts = np.unique(lengths, return_counts=True)
    return tuple((int(v), int(c)) for v, c in zip(values, counts, strict=True))


def two_groups(values: np.ndarray, counts: np.ndarray) -> TwoGroups | None:
    """Return the two groups that rows fall into, None if they make one cloud.

    `values` are the int lengths that occur, ascending, `counts` how often. The border is the
    one that separates best on a log scale (Otsu 1979: the largest variance between classes).
    It counts if both sides hold a tenth of the rows, their medians are 4 times apart, and the
    middle third between them, on the log scale, is nearly empty. A single bell split in two
    has 17 % of its rows there.
    """
    num_rows = int(counts.sum())
    if num_rows < _LEAST_ROWS or len(values) < 2:
        return None
    logs = np.log(np.maximum(values, 1))
    below = np.cumsum(counts)[:-1]  # rows on the short side of each border
    above = num_rows - below
    sums = np.cumsum(logs * counts)
    apart = sums[:-1] / below - (sums[-1] - sums[:-1]) / above
    border = int(np.argmax(below * above * apart**2)) + 1
    short_share = float(below[border - 1] / num_rows)
    if not _LEAST_SHARE <= short_share <= 1 - _LEAST_SHARE:
        return None
    short = _median(values[:border], counts[:border])
    long = _median(values[border:], counts[border:])
    if long < _LEAST_FACTOR * max(short, 1):
        return None
    step = (np.log(long) - np.log(max(short, 1))) / 3
    middle = (logs > np.log(max(short, 1)) + step) & (logs < np.log(long) - step)
    if counts[middle].sum() > _MOST_BETWEEN * num_rows:
        return None
    return TwoGroups(
        short_share=short_share, short_tokens=short, long_share=1 - short_share, long_tokens=long
    )


def _median(values: np.ndarray, counts: np.ndarray) -> int:
    running = np.cumsum(counts)
    return int(values[np.searchsorted(running, running[-1] / 2)])
