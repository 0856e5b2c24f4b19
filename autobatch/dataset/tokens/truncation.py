"""Cut samples to max_length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autobatch.errors import ConfigError, DataError

TRUNCATIONS = ("error", "right", "left", "drop")
_CHUNK_TOKENS = 8_000_000  # labels summed at a time


class Samples(Protocol):
    """What cutting needs of a token cache."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""

    @property
    def lengths(self) -> np.ndarray:
        """int64 (num_samples,), uncut."""

    @property
    def label_tokens(self) -> np.ndarray:
        """int64 (num_samples,), uncut."""

    @property
    def starts(self) -> np.ndarray:
        """int64 (num_samples,): where each sample starts in `labels`."""

    @property
    def labels(self) -> np.ndarray:
        """uint8 (all tokens,): 1 where a token is a label."""


@dataclass(frozen=True, kw_only=True)
class CutLengths:
    """Lengths and label tokens of all samples after the cut, 0 where dropped."""

    lengths: np.ndarray  # int64 (num_samples,)
    label_tokens: np.ndarray  # int64 (num_samples,)
    num_cut: int
    num_dropped: int
    num_without_labels: int  # of the samples that are left


def cut_sample(
    ids: np.ndarray, label_mask: np.ndarray, *, max_length: int | None, truncation: str
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return ids and label mask (T,) cut to `max_length`, None if the sample is dropped.

    `right` keeps the first tokens, `left` the last ones; the first token left is no label,
    since no position predicts it.

    Raises:
        ConfigError: if the truncation or max_length is unknown.
        DataError: if the sample is too long and truncation is `error`.
    """
    _check(max_length, truncation)
    if max_length is None or len(ids) <= max_length:
        return ids, label_mask
    if truncation == "drop":
        return None
    if truncation == "error":
        raise DataError(
            f"a row has {len(ids)} tokens, max_length is {max_length}; "
            f"use max_length={len(ids)}, or data.truncation=drop, right or left"
        )
    if truncation == "right":
        return ids[:max_length], label_mask[:max_length]
    kept = label_mask[-max_length:].copy()
    kept[0] = False
    return ids[-max_length:], kept


def cut_lengths(samples: Samples, *, max_length: int | None, truncation: str) -> CutLengths:
    """Return what `cut_sample` leaves of every sample, without touching the ids.

    Raises:
        ConfigError: if the truncation or max_length is unknown.
        DataError: if a sample is too long and truncation is `error`.
    """
    _check(max_length, truncation)
    lengths = np.array(samples.lengths, dtype=np.int64)
    label_tokens = np.array(samples.label_tokens, dtype=np.int64)
    num_cut = num_dropped = 0
    kept = np.ones(len(lengths), dtype=bool)
    too_long = np.flatnonzero(lengths > max_length) if max_length is not None else np.empty(0, int)
    if len(too_long):
        assert max_length is not None
        longest = int(lengths.max())
        if truncation == "error":
            raise DataError(
                f"{len(too_long)} of {len(lengths)} rows are longer than max_length {max_length}, "
                f"the longest has {longest} tokens; use max_length={longest}, "
                "or data.truncation=drop, right or left"
            )
        if truncation == "drop":
            num_dropped = len(too_long)
            kept[too_long] = False
            lengths[too_long] = label_tokens[too_long] = 0
        else:
            num_cut = len(too_long)
            label_tokens[too_long] = kept_label_tokens(
                samples, too_long, max_length=max_length, truncation=truncation
            )
            lengths[too_long] = max_length
    return CutLengths(
        lengths=lengths,
        label_tokens=label_tokens,
        num_cut=num_cut,
        num_dropped=num_dropped,
        num_without_labels=int((kept & (label_tokens == 0)).sum()),
    )


def trainable(cut: CutLengths) -> np.ndarray:
    """Return int64 indices of the samples that keep at least one label token."""
    return np.flatnonzero(cut.label_tokens > 0).astype(np.int64)


def kept_label_tokens(
    samples: Samples, indices: np.ndarray, *, max_length: int, truncation: str
) -> np.ndarray:
    """Return int64 label tokens that samples longer than `max_length` keep, in order."""
    begins = np.asarray(samples.starts)[indices]
    if truncation == "left":
        # the first token left is no label any more
        begins = begins + np.asarray(samples.lengths)[indices] - max_length + 1
        ends = begins + max_length - 1
    else:
        ends = begins + max_length
    return count_labels(samples.labels, begins, ends)


def count_labels(labels: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return int64 counts of ones in the ascending, disjoint ranges [begins, ends)."""
    counts = np.zeros(len(begins), dtype=np.int64)
    some = np.flatnonzero(ends > begins)
    begins, ends = begins[some], ends[some]
    first = 0
    while first < len(some):
        # as many ranges as one chunk holds, at least one
        limit = begins[first] + _CHUNK_TOKENS
        last = max(first + 1, int(np.searchsorted(ends, limit, side="right")))
        low, high = int(begins[first]), int(ends[last - 1])
        borders = np.stack([begins[first:last], ends[first:last]], axis=1).ravel()[:-1] - low
        sums = np.add.reduceat(labels[low:high], borders, dtype=np.int32)
        counts[some[first:last]] = sums[::2]  # between two ranges lies another sum
        first = last
    return counts


def _check(max_length: int | None, truncation: str) -> None:
    if truncation not in TRUNCATIONS:
        raise ConfigError(f"data.truncation is {truncation!r}; use one of {', '.join(TRUNCATIONS)}")
    if max_length is not None and max_length < 1:
        raise ConfigError(f"max_length is {max_length}; use 1 or more tokens")
