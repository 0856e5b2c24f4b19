"""The largest micro-batch that any order of the rows can form.

A length profile without rows has no order to replay, so these bounds hold for every seed. Legend:
B rows a step, R ranks. `split_over_ranks` gives a row to the rank of least cost so far, cheapest
rows last. So when a rank got its last row, the n - 1 it had cost no more than what any other rank
had, and R - 1 times that is no more than the cost of the B - n rows of the others. That is all the
bounds below rest on; they are exact for one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autobatch.plan.microbatches import MicroBatch, check_longest_row
from autobatch.plan.settings import PAD_MULTIPLE, Plan, effective_train_batch_size
from autobatch.units import round_up

_NUM_PRICES = 33
_ROUNDING = 1 + 1e-9  # sums of FLOPs pass 2**63, so they are floats


@dataclass(frozen=True, kw_only=True, eq=False)
class _Rows:
    """Trainable rows, the longest first, with what one rank can get of them. N rows."""

    lengths: np.ndarray  # int64 (N,), descending
    costs: np.ndarray  # float64 (N,), descending
    room: np.ndarray  # float64 (B,): the most that all of a rank's 1, 2 … rows but the last cost
    least: np.ndarray  # float64 (B,): the cost of the 0, 1, 2 … cheapest rows
    most_rows: int  # of one rank


def worst_of_any_draw(plan: Plan) -> MicroBatch:
    """Return a micro-batch of at least the tokens and squared lengths of any that can be drawn.

    With a token budget its rows are the longest ones until the fullest sum of rows is reached, the
    last one cut: no rows of that sum have a larger sum of squares, or of any convex function of
    length (Tomić 1949, Weyl 1949: weak majorization). `samples` is empty: it is no real draw.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    rows, settings = _rows_of(plan), plan.settings
    padded_to = None
    if settings.max_token_len_per_gpu is not None:
        budget = settings.max_token_len_per_gpu
        check_longest_row(int(rows.lengths[0]), budget)
        lengths = _longest_up_to(rows.lengths, min(budget, _most_tokens(rows)))
    else:
        assert settings.micro_batch_size_per_gpu is not None
        num_rows = min(settings.micro_batch_size_per_gpu, rows.most_rows)
        longest = int(rows.lengths[0])
        if settings.use_remove_padding:
            pass
        elif settings.pad_to == "max_length":
            padded_to = settings.max_length
        else:
            num_rows, longest = _worst_padded(rows, num_rows)
            padded_to = round_up(longest, PAD_MULTIPLE)
        lengths = np.minimum(rows.lengths[:num_rows], longest)
    return MicroBatch(samples=(), lengths=tuple(lengths.tolist()), padded_to=padded_to)


def size_bounds_of_any_draw(plan: Plan) -> tuple[int, int]:
    """Return the smallest and the largest useful size: rows, or tokens of a budget."""
    rows = _rows_of(plan)
    if plan.settings.micro_batch_size_per_gpu is not None:
        return 1, rows.most_rows
    longest = int(rows.lengths[0])
    return longest, max(longest, _most_tokens(rows))


def _rows_of(plan: Plan) -> _Rows:
    lengths, costs = plan.lengths[plan.trainable], plan.costs[plan.trainable]
    order = np.lexsort((-costs, -lengths))
    lengths, costs = lengths[order], costs[order].astype(np.float64)
    assert (np.diff(costs) <= 0).all()  # a longer row never costs less
    size, num_others = effective_train_batch_size(plan), plan.settings.data_parallel_size - 1
    room = np.full(size, np.inf)
    if num_others:
        room = _sums(costs[: size - 1])[::-1] / num_others * _ROUNDING
    least = _sums(costs[::-1][: size - 1])
    return _Rows(
        lengths=lengths,
        costs=costs,
        room=room,
        least=least,
        most_rows=int(np.flatnonzero(least <= room)[-1]) + 1,
    )


def _sums(values: np.ndarray) -> np.ndarray:
    """Return the sums of the first 0, 1, 2 … values."""
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])


def _most_tokens(rows: _Rows) -> int:
    """Return the most tokens that the rows of one rank can have.

    For any price p >= 0 of a unit of cost, rows that cost at most `room` have no more tokens than
    p * room + the sum of (length - p * cost) of those where it is positive (weak duality). A
    rank's last row is no longer than the mean of its others.
    """
    counts = np.arange(1, rows.most_rows + 1)
    most = np.cumsum(rows.lengths[: rows.most_rows]).astype(np.float64)
    if np.isfinite(rows.room[0]):
        room, others = rows.room[1 : rows.most_rows], counts[:-1]
        by_cost = rows.lengths / rows.costs
        for price in [0.0, *np.quantile(by_cost, np.linspace(0, 1, _NUM_PRICES))]:
            worth = np.sort(np.maximum(rows.lengths - price * rows.costs, 0))[::-1]
            bound = (price * room + np.cumsum(worth[: len(others)])) * (others + 1) / others
            most[1:] = np.minimum(most[1:], bound)
    return int(most.max() * _ROUNDING)


def _worst_padded(rows: _Rows, num_rows: int) -> tuple[int, int]:
    """Return rows and longest row of a padded micro-batch that no draw of `num_rows` rows passes.

    Most tokens and most squares may be of two draws (an outlier that is alone on its rank): then
    the longer row is taken with as many rows as give the tokens.
    """
    counts = np.arange(1, num_rows + 1)
    left = rows.room[:num_rows] - rows.least[np.maximum(counts - 2, 0)]
    left[0] = rows.costs[0]  # a rank may hold any row alone
    longest = rows.lengths[np.searchsorted(-rows.costs, -np.minimum(left, rows.costs[0]))]
    padded = -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE
    squarest = int(np.argmax(counts * padded * padded))
    most_tokens, width = int((counts * padded).max()), int(padded[squarest])
    return -(-most_tokens // width), int(longest[squarest])


def _longest_up_to(lengths: np.ndarray, most_tokens: int) -> np.ndarray:
    """Return the longest rows, the last one cut, that have the largest sum of rows there is.

    The sum is at most `most_tokens`. Lengths 6 5 5 and 10 tokens give 6 4: the sum of 5 and 5.
    """
    total = largest_sum(lengths, most_tokens)
    sums = np.cumsum(lengths)
    whole = int(np.searchsorted(sums, total, side="right"))
    rest = total - (int(sums[whole - 1]) if whole else 0)
    return np.append(lengths[:whole], rest) if rest else lengths[:whole]


def largest_sum(lengths: np.ndarray, most: int) -> int:
    """Return the largest sum of some of the lengths that is at most `most`; each is used once."""
    values, counts = np.unique(lengths, return_counts=True)
    unit = int(np.gcd.reduce(values))  # lengths of whole blocks reach no sum between
    values, most = values // unit, most // unit
    reached, mask = 1, (1 << (most + 1)) - 1  # bit n: some of the rows have n tokens
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        left, some = min(count, most // value), 1
        while left:  # 1, 2, 4 … rows at a time make every number of them
            some = min(some, left)
            reached |= reached << some * value & mask
            left -= some
            some *= 2
        if reached >> most:
            return most * unit
    return (reached.bit_length() - 1) * unit
