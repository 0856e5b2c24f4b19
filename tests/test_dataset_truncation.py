"""Cutting samples, and what max_length costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from autobatch.dataset.lengths.advice import advise
from autobatch.dataset.lengths.stats import length_stats
from autobatch.dataset.tokens.truncation import (
    cut_lengths,
    cut_sample,
    kept_label_tokens,
    trainable,
)
from autobatch.errors import ConfigError, DataError


@dataclass(frozen=True)
class Samples:
    """A few samples in memory, as a token cache shows them."""

    lengths: np.ndarray
    label_tokens: np.ndarray
    starts: np.ndarray
    labels: np.ndarray
    num_samples: int

    def mask(self, i: int) -> np.ndarray:
        """The label mask of a sample."""
        return self.labels[self.starts[i] :][: self.lengths[i]].astype(bool)


def samples(*rows: tuple[int, int]) -> Samples:
    """Make samples of (prompt tokens, label tokens)."""
    lengths = np.array([prompt + answer for prompt, answer in rows])
    labels = np.concatenate([np.arange(p + a) >= p for p, a in rows]).astype(np.uint8)
    return Samples(
        lengths=lengths,
        label_tokens=np.array([answer for _, answer in rows]),
        starts=np.cumsum(lengths) - lengths,
        labels=labels,
        num_samples=len(rows),
    )


def advice(given: Samples):
    """Advise on samples cut from the right."""
    return advise(
        given.lengths,
        label_tokens=given.label_tokens,
        kept_labels=lambda indices, max_length: kept_label_tokens(
            given, indices, max_length=max_length, truncation="right"
        ),
    )


IDS = np.arange(5, dtype=np.int32)
MASK = np.array([False, False, True, True, True])


def test_right_keeps_the_first_tokens():
    """`right` cuts the end away."""
    ids, mask = cut_sample(IDS, MASK, max_length=3, truncation="right")
    assert ids.tolist() == [0, 1, 2]
    assert mask.tolist() == [False, False, True]


def test_left_keeps_the_last_tokens_and_clears_the_first_label():
    """`left` cuts the start away; its new first token has nothing to predict it."""
    ids, mask = cut_sample(IDS, MASK, max_length=3, truncation="left")
    assert ids.tolist() == [2, 3, 4]
    assert mask.tolist() == [False, True, True]
    assert MASK.tolist() == [False, False, True, True, True]


def test_exact_length_is_not_cut():
    """A sample of max_length tokens passes under every truncation."""
    for truncation in ("error", "right", "left", "drop"):
        assert cut_sample(IDS, MASK, max_length=5, truncation=truncation) == (IDS, MASK)


def test_drop_returns_none():
    """`drop` leaves out what is too long."""
    assert cut_sample(IDS, MASK, max_length=4, truncation="drop") is None


def test_error_names_length_limit_and_choices():
    """`error` says the length, the limit and the choices."""
    with pytest.raises(DataError, match=r"5 tokens, max_length is 4; .*drop, right or left"):
        cut_sample(IDS, MASK, max_length=4, truncation="error")


def test_cut_lengths_error_counts_rows():
    """The error over all samples gives the longest, the count and the next moves."""
    with pytest.raises(DataError, match=r"2 of 3 rows .*longest has 9 .*max_length=9.*drop"):
        cut_lengths(samples((1, 2), (5, 4), (2, 3)), max_length=4, truncation="error")


@pytest.mark.parametrize("options", [(0, "right"), (4, "middle")])
def test_bad_settings_are_refused(options):
    """Unknown truncation and max_length below 1 are config errors."""
    with pytest.raises(ConfigError):
        cut_lengths(samples((1, 2)), max_length=options[0], truncation=options[1])


@pytest.mark.parametrize("truncation", ["right", "left", "drop"])
@pytest.mark.parametrize("max_length", [1, 2, 3, 5, 8, 100, None])
def test_cut_lengths_equal_cutting_each_sample(max_length, truncation):
    """The arithmetic over all samples equals cutting them one by one."""
    given = samples((1, 2), (7, 1), (0, 8), (3, 5), (6, 6), (2, 1))
    cut = cut_lengths(given, max_length=max_length, truncation=truncation)
    lengths, labels = [], []
    for i in range(given.num_samples):
        one = cut_sample(
            np.zeros(given.lengths[i]), given.mask(i), max_length=max_length, truncation=truncation
        )
        lengths.append(0 if one is None else len(one[0]))
        labels.append(0 if one is None else int(one[1].sum()))
    assert lengths == cut.lengths.tolist()
    assert labels == cut.label_tokens.tolist()
    assert trainable(cut).tolist() == np.flatnonzero(labels).tolist()


def test_rows_that_lose_their_whole_answer_are_counted():
    """200 prompt tokens cut at 128 leave no label; at 205 half the answer (A14)."""
    given = samples(*[(200, 10)] * 60, *[(20, 10)] * 4)
    counts = [
        cut_lengths(given, max_length=n, truncation="right").num_without_labels
        for n in (128, 205, 256)
    ]
    assert counts == [60, 0, 0]


def test_dropped_rows_are_not_rows_without_labels():
    """Dropped is one count, left without labels another."""
    cut = cut_lengths(samples((5, 4), (2, 0), (1, 1)), max_length=4, truncation="drop")
    assert (cut.num_dropped, cut.num_without_labels, cut.num_cut) == (1, 1, 0)


def test_percentile_is_a_length_of_the_data():
    """p50 of two rows is the shorter one: half the rows are at or below it."""
    assert length_stats(np.array([10, 20])).p50 == 10


def test_one_huge_row_does_not_decide():
    """999 rows near 50 tokens and one of 200,000: the advice stays near 50 (A07)."""
    advised = advice(samples(*[(25, 20 + i % 10) for i in range(999)], (10, 199_990)))
    assert advised.recommended == 56
    assert "1 of 1000 rows" in advised.reason


def test_even_rows_are_not_cut():
    """All rows within 5 % of 1000: the longest, rounded up to 8, so nothing is cut (A07)."""
    advised = advice(samples(*[(500, 450 + i) for i in range(100)]))
    assert advised.recommended == 1056
    assert advised.curve[-1].rows_cut == 0


def test_two_humps_are_not_cut():
    """Half the rows at 100, half at 4000: no half is thrown away (A07)."""
    advised = advice(samples(*[(50, 50), (50, 3950)] * 50))
    assert advised.recommended == 4000
    assert advised.curve[-1].padding_fraction.to_longest > 0.4


def test_long_tail_loses_at_most_one_percent_of_labels():
    """Without a row that stands apart, the advised cut costs at most 1 % of label tokens."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 5000).astype(int) + 2
    given = samples(*[(1, int(n)) for n in lengths])
    advised = advice(given)
    option = next(o for o in advised.curve if o.max_length == advised.recommended)
    assert 0 < option.label_tokens_lost <= 0.01 * given.label_tokens.sum()


def test_candidates_are_aligned_and_reach_the_longest_row():
    """Every candidate is a multiple of 8, ascending, the last one cuts nothing."""
    curve = advice(samples(*[(1, n) for n in range(1, 300)])).curve
    lengths = [option.max_length for option in curve]
    assert sorted(set(lengths)) == lengths
    assert all(n % 8 == 0 for n in lengths)
    assert curve[-1].label_tokens_lost == 0


def test_padding_counts_computed_tokens():
    """Eight rows of 8 and eight of 16, sorted: no padding; to max_length: a quarter."""
    curve = advice(samples(*[(4, 4), (8, 8)] * 8)).curve
    assert (curve[-1].padding_fraction.sorted, curve[-1].padding_fraction.to_max_length) == (
        0.0,
        0.25,
    )
