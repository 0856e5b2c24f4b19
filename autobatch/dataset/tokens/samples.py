"""Hold rendered rows, many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SampleBatch:
    """Rows that rendered, uncut, in order. Legend: N samples, T tokens of all of them."""

    table: np.ndarray  # int64 (N, 4): length, label tokens, file index, row in that file
    ids: np.ndarray  # int32 (T,)
    labels: np.ndarray  # uint8 (T,), 1 = label; 0 at the first token, which none predicts

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.table)


def make_batch(
    places: Sequence[tuple[int, int]], lengths: np.ndarray, ids: np.ndarray, labels: np.ndarray
) -> SampleBatch:
    """Return the batch of samples at (file index, row), each of `lengths` >= 1 tokens."""
    starts = np.cumsum(lengths) - lengths
    labels[starts] = 0
    table = np.empty((len(places), 4), dtype=np.int64)
    table[:, 0] = lengths
    table[:, 1] = np.add.reduceat(labels, starts, dtype=np.int64) if len(places) else 0
    table[:, 2:] = np.array(places, dtype=np.int64).reshape(-1, 2)
    return SampleBatch(table=table, ids=ids, labels=labels)


def flatten(rows: Iterable[Sequence[int]], lengths: np.ndarray) -> np.ndarray:
    """Return int32 (T,): the ids of all rows, one after the other."""
    return np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(lengths.sum()))
