"""Advise a max_length by what each choice costs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autobatch.dataset.lengths import length_stats
from autobatch.records import LengthStats, MaxLengthAdvice, MaxLengthOption, PaddingFraction
from autobatch.units import round_up

BATCH_ROWS = 8  # rows of the batches that padding is counted in
LOST_LABELS_ALLOWED = 0.01  # share of label tokens a recommendation may cut
_NARROW = 2  # where the longest row is within this many p99, nothing need be cut
_GAP = 3  # rows this many times longer than the next shorter one stand apart
_SMALLEST = 64  # powers of two below are of no use as max_length


def advise(
    lengths: np.ndarray,
    *,
    label_tokens: np.ndarray,
    kept_labels: Callable[[np.ndarray, int], np.ndarray],
) -> MaxLengthAdvice:
    """Return the recommended max_length with the cost of every candidate.

    `lengths` and `label_tokens` are int64 (N,), uncut. `kept_labels(indices, max_length)`
    gives the label tokens those samples keep when all but their first max_length tokens
    are cut (truncation `right`).
    """
    stats = length_stats(lengths)
    curve = []
    losses = []  # label tokens lost by rows that are no outliers
    longest_ordinary = without_outliers(lengths, stats)
    ordinary = lengths <= longest_ordinary
    for max_length in candidates(stats, longest_ordinary):
        cut = np.flatnonzero(lengths > max_length)
        kept = label_tokens.copy()
        kept[cut] = kept_labels(cut, max_length)
        losses.append(int((label_tokens - kept)[ordinary].sum()))
        curve.append(
            MaxLengthOption(
                max_length=max_length,
                rows_cut=len(cut),
                label_tokens_lost=int((label_tokens - kept).sum()),
                rows_without_labels=int((kept == 0).sum()),
                padding_fraction=padding_fraction(
                    np.minimum(lengths, max_length)[kept > 0], max_length
                ),
            )
        )
    if longest_ordinary <= _NARROW * stats.p99:
        chosen = next(o for o in curve if o.max_length >= longest_ordinary)
    else:
        allowed = LOST_LABELS_ALLOWED * int(label_tokens[ordinary].sum())
        wide_enough = (
            option
            for option, lost in zip(curve, losses, strict=True)
            if option.max_length >= stats.p99 and lost <= allowed
        )
        chosen = next(wide_enough, curve[-1])
    return MaxLengthAdvice(
        recommended=chosen.max_length,
        reason=_reason(chosen, stats, len(lengths), int(label_tokens.sum())),
        curve=tuple(curve),
    )


def without_outliers(lengths: np.ndarray, stats: LengthStats) -> int:
    """Return the longest row that does not stand apart from the others.

    A row stands apart if it is among the longest 1 % and at least 3 times longer than the
    next shorter row, as are all rows above it. Example: 999 rows of 50 tokens with one of
    200,000 give 50; a long even tail gives its maximum.
    """
    top = np.sort(lengths[lengths >= stats.p99])
    apart = np.flatnonzero(top[1:] >= _GAP * np.maximum(top[:-1], 1))
    return int(top[apart[0]]) if len(apart) else stats.max


def candidates(stats: LengthStats, longest_ordinary: int) -> tuple[int, ...]:
    """Return the max_lengths worth weighing, ascending.

    They are the percentiles, the longest row and the longest that is no outlier, rounded up
    to 8, and the powers of two from the median to the longest.
    """
    marks = (stats.p50, stats.p90, stats.p95, stats.p99, longest_ordinary, stats.max)
    found = {round_up(n, 8) for n in marks}
    power = _SMALLEST
    while power < stats.max:
        if power >= stats.p50:
            found.add(power)
        power *= 2
    return tuple(sorted(found))


def padding_fraction(lengths: np.ndarray, max_length: int) -> PaddingFraction:
    """Return the share of computed tokens that are padding, for cut int64 lengths (N,).

    A padded batch is as wide as its longest row rounded up to 8. `to_longest` draws batches
    from one shuffle with a fixed seed; packed rows need no padding.
    """
    shuffled = np.random.default_rng(0).permutation(lengths)
    return PaddingFraction(
        to_max_length=_padding(int(lengths.sum()), len(lengths) * max_length),
        to_longest=_batched_padding(shuffled),
        sorted=_batched_padding(np.sort(lengths)),
        packed=0.0,
    )


def _batched_padding(lengths: np.ndarray) -> float:
    if not len(lengths):
        return 0.0
    begins = np.arange(0, len(lengths), BATCH_ROWS)
    widths = -(-np.maximum.reduceat(lengths, begins) // 8) * 8
    rows = np.diff(np.append(begins, len(lengths)))
    return _padding(int(lengths.sum()), int((widths * rows).sum()))


def _padding(num_tokens: int, num_computed: int) -> float:
    return 1 - num_tokens / num_computed if num_computed else 0.0


def _reason(
    chosen: MaxLengthOption, stats: LengthStats, num_samples: int, num_label_tokens: int
) -> str:
    if not chosen.rows_cut:
        near = stats.max <= _NARROW * stats.p99
        why = (
            f"the longest row, {stats.max} tokens, is within {_NARROW} times p99 ({stats.p99})"
            if near
            else f"any shorter choice loses more than {LOST_LABELS_ALLOWED:.0%} of label tokens"
        )
        return f"Nothing is cut: {why}."
    lost = chosen.label_tokens_lost / max(1, num_label_tokens)
    return (
        f"It cuts {chosen.rows_cut} of {num_samples} rows with {lost:.2%} of label tokens; "
        f"p99 is {stats.p99} tokens, and the longest row, {stats.max}, would make padded batches "
        f"{stats.max / chosen.max_length:.1f} times as wide."
    )
