"""Advise a max_length by what each choice costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autobatch.dataset.lengths.stats import TwoGroups, length_stats, two_groups
from autobatch.records import LengthStats, MaxLengthAdvice, MaxLengthOption, PaddingFraction
from autobatch.units import round_up

BATCH_ROWS = 8  # rows of the batches that padding is counted in
LOST_LABELS_ALLOWED = 0.01  # share of label tokens a recommendation may cut
_NARROW = 2  # where the longest row is within this many p99, nothing need be cut
_GAP = 2  # rows this many times longer than the next shorter one stand apart
_WIDE_GAP = 10  # where the longest row alone is more than 1 % of the rows
_FEW_ROWS = 20  # below no row stands apart
_SMALLEST = 64  # powers of two below are of no use as max_length

KeptLabels = Callable[[np.ndarray, int], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class _Batches:
    """Batches of uncut rows: a cut at L leaves min(longest, L), so they are made once."""

    longest: np.ndarray  # int32 (batches,)
    num_rows: np.ndarray  # int64 (batches,)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The rows that are weighed, with what every candidate needs of them. N samples."""

    lengths: np.ndarray  # int64 (N,), uncut
    label_tokens: np.ndarray  # int64 (N,), uncut
    kept_labels: KeptLabels
    shuffled: np.ndarray  # uint32: the samples with labels in the order of one shuffle
    ascending: np.ndarray  # int32: the lengths of the samples with labels, sorted
    shuffled_batches: _Batches
    sorted_batches: _Batches


def advise(
    lengths: np.ndarray, *, label_tokens: np.ndarray, kept_labels: KeptLabels
) -> MaxLengthAdvice:
    """Return the recommended max_length with the cost of every candidate.

    `lengths` and `label_tokens` are int64 (N,), uncut. `kept_labels(indices, max_length)`
    gives the label tokens those samples keep when all but their first max_length tokens
    are cut (truncation `right`).
    """
    rows = _rows(lengths, label_tokens, kept_labels)
    stats = length_stats(lengths)
    longest_ordinary = without_outliers(lengths)
    weighed = [_weigh(rows, n, longest_ordinary) for n in candidates(stats, longest_ordinary)]
    curve = tuple(option for option, _ in weighed)
    if longest_ordinary <= _NARROW * stats.p99:
        chosen = next(o for o in curve if o.max_length >= longest_ordinary)
    else:
        ordinary = lengths <= longest_ordinary
        allowed = LOST_LABELS_ALLOWED * int(label_tokens[ordinary].sum())
        wide_enough = (o for o, lost in weighed if o.max_length >= stats.p99 and lost <= allowed)
        chosen = next(wide_enough, curve[-1])
    groups = two_groups(*np.unique(lengths, return_counts=True))
    return MaxLengthAdvice(
        recommended=chosen.max_length,
        reason=_reason(chosen, rows, stats, longest_ordinary, groups),
        curve=curve,
    )


def cost_of(
    max_length: int, lengths: np.ndarray, *, label_tokens: np.ndarray, kept_labels: KeptLabels
) -> MaxLengthOption:
    """Return what one more max_length costs; arguments as for `advise`."""
    return _weigh(_rows(lengths, label_tokens, kept_labels), max_length, max_length)[0]


def without_outliers(lengths: np.ndarray) -> int:
    """Return the longest row that does not stand apart from the others.

    Rows stand apart if they are among the longest 1 % and at least twice as long as the next
    shorter row; of 20 to 99 rows the longest may, if it is 10 times as long. Example: 999 rows
    of 50 tokens with one of 200,000 give 50; a long even tail gives its maximum.
    """
    num_apart = len(lengths) // 100 or int(len(lengths) >= _FEW_ROWS)
    gap = _GAP if len(lengths) >= 100 else _WIDE_GAP
    first = len(lengths) - 1 - num_apart
    top = np.sort(np.partition(lengths, first)[first:])
    apart = np.flatnonzero(top[1:] >= gap * np.maximum(top[:-1], 1))
    return int(top[apart[0]] if len(apart) else top[-1])


def candidates(stats: LengthStats, longest_ordinary: int) -> tuple[int, ...]:
    """Return the max_lengths worth weighing, ascending.

    They are the percentiles, the longest row and the longest that is no outlier, rounded up
    to 8, and the powers of two from the median to the longest.
    """
    marks = (stats.p50, stats.p90, stats.p95, stats.p99, longest_ordinary, stats.max)
    found = {round_up(max(n, 1), 8) for n in marks}
    power = _SMALLEST
    while power < stats.max:
        if power >= stats.p50:
            found.add(power)
        power *= 2
    return tuple(sorted(found))


def _rows(lengths: np.ndarray, label_tokens: np.ndarray, kept_labels: KeptLabels) -> _Rows:
    with_labels = np.flatnonzero(label_tokens > 0).astype(np.uint32)
    shuffled = np.random.default_rng(0).permutation(with_labels)
    ascending = np.sort(lengths[with_labels].astype(np.int32))
    return _Rows(
        lengths=lengths,
        label_tokens=label_tokens,
        kept_labels=kept_labels,
        shuffled=shuffled,
        ascending=ascending,
        shuffled_batches=_batches(lengths[shuffled].astype(np.int32)),
        sorted_batches=_batches(ascending),
    )


def _batches(lengths: np.ndarray) -> _Batches:
    begins = np.arange(0, len(lengths), BATCH_ROWS)
    longest = np.maximum.reduceat(lengths, begins) if len(lengths) else lengths
    return _Batches(longest=longest, num_rows=np.diff(np.append(begins, len(lengths))))


def _weigh(rows: _Rows, max_length: int, longest_ordinary: int) -> tuple[MaxLengthOption, int]:
    """Return a candidate's cost, and the label tokens lost by rows that are no outliers."""
    cut = np.flatnonzero(rows.lengths > max_length)
    kept = rows.kept_labels(cut, max_length)
    lost = rows.label_tokens[cut] - kept
    emptied = cut[(kept == 0) & (lost > 0)]
    option = MaxLengthOption(
        max_length=max_length,
        rows_cut=len(cut),
        label_tokens_lost=int(lost.sum()),
        rows_without_labels=len(rows.lengths) - len(rows.shuffled) + len(emptied),
        padding_fraction=_padding_fraction(rows, max_length, emptied),
    )
    return option, int(lost[rows.lengths[cut] <= longest_ordinary].sum())


def _padding_fraction(rows: _Rows, max_length: int, emptied: np.ndarray) -> PaddingFraction:
    """Return the share of computed tokens that are padding, for the rows that train.

    A padded batch is as wide as its longest row rounded up to 8. `to_longest` draws batches
    from one shuffle with a fixed seed; packed rows need no padding.
    """
    ascending, in_shuffle, in_order = rows.ascending, rows.shuffled_batches, rows.sorted_batches
    if len(emptied):
        is_left = np.ones(len(rows.lengths), dtype=bool)
        is_left[emptied] = False
        left = rows.shuffled[is_left[rows.shuffled]]
        in_shuffle = _batches(rows.lengths[left].astype(np.int32))
        # emptied rows were all cut, so after the cut they are among the last of the sorted ones
        ascending = np.minimum(ascending, max_length)[: len(left)]
        in_order = _batches(ascending)
    uncut = int(np.searchsorted(ascending, max_length, side="right"))
    num_tokens = int(ascending[:uncut].sum(dtype=np.int64)) + (len(ascending) - uncut) * max_length
    return PaddingFraction(
        to_max_length=_padding(num_tokens, len(ascending) * max_length),
        to_longest=_padding(num_tokens, _num_computed(in_shuffle, max_length)),
        sorted=_padding(num_tokens, _num_computed(in_order, max_length)),
        packed=0.0,
    )


def _num_computed(batches: _Batches, max_length: int) -> int:
    longest = np.minimum(batches.longest, max_length).astype(np.int64)
    return int((-(-longest // 8) * 8 * batches.num_rows).sum())


def _padding(num_tokens: int, num_computed: int) -> float:
    return 1 - num_tokens / num_computed if num_computed else 0.0


def _reason(
    chosen: MaxLengthOption,
    rows: _Rows,
    stats: LengthStats,
    longest_ordinary: int,
    groups: TwoGroups | None,
) -> str:
    if not chosen.rows_cut:
        why = f"the longest row, {stats.max} tokens, "
        if stats.max <= _NARROW * stats.p99:
            why += f"is within {_NARROW} times p99 ({stats.p99})"
        else:
            why += f"and those near it hold more than {LOST_LABELS_ALLOWED:.0%} of label tokens"
        beyond = int((rows.lengths > stats.p95).sum())
        said = f"Nothing is cut: {why}"
        if beyond and groups is None:
            said += (
                f"; p95 ({stats.p95}) would cut {beyond} {_rows_word(beyond)}, and with "
                "truncation=error the first of them ends the run"
            )
    else:
        said = cut_words(chosen, len(rows.lengths), int(rows.label_tokens.sum()))
        said += f"; p99 is {stats.p99} tokens, " + (
            f"{chosen.rows_cut} {_rows_word(chosen.rows_cut)} up to {stats.max} "
            f"stand{'s' if chosen.rows_cut == 1 else ''} apart"
            if chosen.max_length >= longest_ordinary
            else f"the longest row {stats.max}"
        )
    if groups is not None:
        said += (
            f"; but {groups.short_share:.0%} of the rows are around {groups.short_tokens} tokens "
            f"and {groups.long_share:.0%} around {groups.long_tokens}, so no one number suits "
            "both: batch rows by length or train padding-free (model.use_remove_padding=true)"
        )
    return f"{said}."


def cut_words(option: MaxLengthOption, num_samples: int, num_label_tokens: int) -> str:
    """Return what a max_length that cuts rows does to them, and to a run, without a stop."""
    lost = option.label_tokens_lost / max(1, num_label_tokens)
    empty = option.rows_without_labels
    return (
        f"It cuts {option.rows_cut} of {num_samples} rows with {lost:.2%} of label tokens and "
        f"leaves {empty} {_rows_word(empty)} without labels; truncation=error would end the run "
        f"at the first, so set data.truncation=right, left or drop"
    )


def _rows_word(count: int) -> str:
    return "row" if count == 1 else "rows"
