"""Describe a set of token lengths."""

from __future__ import annotations

import numpy as np

from autobatch.records import LengthStats


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
