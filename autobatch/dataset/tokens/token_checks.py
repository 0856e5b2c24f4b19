"""Count what ids alone show, in one pass over all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autobatch.dataset.tokens.cache import TokenCache

_CHUNK_TOKENS = 4_000_000


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Counts over all samples of a cache."""

    largest_id: int
    num_unknown: int  # unk tokens
    num_rows_unknown: int
    num_rows_without_eos: int  # samples with labels, none of which is EOS
    num_rows_without_bos: int
    num_rows_two_bos: int


def count_tokens(
    cache: TokenCache, *, unk_id: int | None, eos_id: int | None, bos_id: int | None
) -> TokenCounts:
    """Return the counts; those of a token that does not exist are 0. Memory is bounded."""
    totals = dict.fromkeys(("unk", "unk_rows", "eos_rows", "bos_rows", "two_bos"), 0)
    largest = 0
    for first, last in _chunks(cache):
        begins = cache.starts[first:last] - cache.starts[first]
        low, high = int(cache.starts[first]), int(cache.starts[last - 1] + cache.lengths[last - 1])
        tokens = np.asarray(cache.tokens[low:high])
        largest = max(largest, int(tokens.max()))
        if unk_id is not None:
            unknown = np.flatnonzero(tokens == unk_id)
            totals["unk"] += len(unknown)
            totals["unk_rows"] += _num_rows(begins, unknown)
        if eos_id is not None:
            ends = np.flatnonzero(tokens == eos_id)
            is_label = np.asarray(cache.labels[low:high])[ends] > 0
            totals["eos_rows"] += _num_rows(begins, ends[is_label])
        if bos_id is not None:
            opens = tokens[begins] == bos_id
            totals["bos_rows"] += int(opens.sum())
            longer = begins[opens & (cache.lengths[first:last] > 1)]
            totals["two_bos"] += int((tokens[longer + 1] == bos_id).sum())
    num_trainable = int((cache.label_tokens > 0).sum())
    return TokenCounts(
        largest_id=largest,
        num_unknown=totals["unk"],
        num_rows_unknown=totals["unk_rows"],
        num_rows_without_eos=0 if eos_id is None else num_trainable - totals["eos_rows"],
        num_rows_without_bos=0 if bos_id is None else cache.num_samples - totals["bos_rows"],
        num_rows_two_bos=totals["two_bos"],
    )


def count_beyond(cache: TokenCache, vocab_size: int) -> tuple[int, int]:
    """Return the number of ids that are `vocab_size` or larger, and of the rows with one."""
    num_tokens = num_rows = 0
    for first, last in _chunks(cache):
        low, high = int(cache.starts[first]), int(cache.starts[last - 1] + cache.lengths[last - 1])
        beyond = np.flatnonzero(np.asarray(cache.tokens[low:high]) >= vocab_size)
        num_tokens += len(beyond)
        num_rows += _num_rows(cache.starts[first:last] - low, beyond)
    return num_tokens, num_rows


def _chunks(cache: TokenCache) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole samples, each of about `_CHUNK_TOKENS` tokens, at least one sample."""
    first = 0
    while first < cache.num_samples:
        limit = int(cache.starts[first]) + _CHUNK_TOKENS
        last = max(first + 1, int(np.searchsorted(cache.starts, limit, side="left")))
        yield first, last
        first = last


def _num_rows(begins: np.ndarray, positions: np.ndarray) -> int:
    """Return how many samples, by where they begin, hold one of the ascending positions."""
    rows = np.searchsorted(begins, positions, side="right")
    return int((np.diff(rows) > 0).sum()) + int(len(rows) > 0)
