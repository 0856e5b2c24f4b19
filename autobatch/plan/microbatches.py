"""Rows cut into micro-batches, by token budget or by row count."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from autobatch.errors import PlanError
from autobatch.units import round_up


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The rows of one forward pass on one rank.

    A filler keeps the collectives of the ranks in step: it runs, but its labels do not count.
    """

    samples: tuple[int, ...]  # indices into the cache
    lengths: tuple[int, ...]  # tokens of each row, without padding
    padded_to: int | None  # tokens every row is padded to; None: packed without padding
    is_filler: bool = False

    @property
    def num_tokens(self) -> int:
        """Computed tokens: padded ones count."""
        if self.padded_to is None:
            return sum(self.lengths)
        return len(self.lengths) * self.padded_to

    @property
    def num_real_tokens(self) -> int:
        """Tokens of the rows themselves."""
        return sum(self.lengths)

    @property
    def sum_squared_lengths(self) -> int:
        """Sum of the squared computed row lengths, the size of the attention squares."""
        if self.padded_to is None:
            return sum(length * length for length in self.lengths)
        return len(self.lengths) * self.padded_to * self.padded_to


def check_longest_row(longest: int, max_token_len: int) -> None:
    """Refuse a token budget that the longest row does not fit.

    Raises:
        PlanError: if `longest` is above `max_token_len`.
    """
    if longest > max_token_len:
        raise PlanError(
            f"max_token_len_per_gpu={max_token_len} is below the longest row, {longest} tokens; "
            f"use {round_up(longest, 8)} or more, "
            f"or max_length={max_token_len} data.truncation=drop"
        )


def pack_by_tokens(lengths: Sequence[int], max_token_len: int) -> list[list[int]]:
    """Return bins of positions in `lengths`, none above `max_token_len` tokens, each row once.

    Best-fit decreasing: the longest row first, each into the fullest bin that still holds it.
    Budget 10 and lengths 6 5 4 3 give [0 2] [1 3].

    Raises:
        PlanError: if a row is longer than the budget.
    """
    check_longest_row(max(lengths, default=0), max_token_len)
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for position in _longest_first(lengths):
        length = lengths[position]
        best = bisect_left(room, (length, -1))
        if best < len(room):
            free, index = room.pop(best)
            bins[index].append(position)
        else:
            free, index = max_token_len, len(bins)
            bins.append([position])
        insort(room, (free - length, index))
    return bins


def cut_by_rows(lengths: Sequence[int], micro_batch_size: int) -> list[list[int]]:
    """Return chunks of `micro_batch_size` positions, longest rows first; the last may be smaller.

    Rows of similar length share a micro-batch, so that little is padded.
    """
    assert micro_batch_size >= 1
    order = _longest_first(lengths)
    return [order[i : i + micro_batch_size] for i in range(0, len(order), micro_batch_size)]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    # stable: equal lengths stay in order of position
    return sorted(range(len(lengths)), key=lambda position: -lengths[position])
