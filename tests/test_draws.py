"""No order of the rows forms a micro-batch that the worst of any draw does not cover."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.errors import PlanError
from autobatch.plan.draws import largest_sum
from autobatch.plan.epochs import iter_steps
from autobatch.plan.microbatches import MicroBatch
from autobatch.plan.settings import Plan, PlanSettings, make_plan
from autobatch.plan.worst import size_bounds, squarest_micro_batch, worst_micro_batch
from autobatch.tuning.certificate import certify
from autobatch.tuning.space import load_of

BASE = PlanSettings(
    train_batch_size=4,
    data_parallel_size=1,
    seed=0,
    total_epochs=1,
    total_training_steps=None,
    max_token_len_per_gpu=None,
    micro_batch_size_per_gpu=None,
    use_remove_padding=True,
)
COSTS = {
    "tokens": lambda n: n,
    "squares": lambda n: n * n,
    "flops": lambda n: 3_000_000_000 * n + 260_000_000 * n * n,
}


def plan_of(lengths, cost="tokens", *, any_draw=True, **changes) -> Plan:
    """Return the plan of rows whose every token is a label."""
    values = np.array(lengths)
    return make_plan(
        replace(BASE, **changes),
        lengths=values,
        label_tokens=values,
        costs=COSTS[cost](values),
        any_draw=any_draw,
    )


def every_batch(plan: Plan, cost: str) -> Iterator[MicroBatch]:
    """Yield the micro-batches of every group of rows that some order puts into one step."""
    size = min(plan.settings.train_batch_size, len(plan.lengths))
    for num_rows in {size, len(plan.lengths) % size or size}:
        for rows in combinations(plan.lengths.tolist(), num_rows):
            settings_of_one = replace(plan.settings, train_batch_size=num_rows)
            step = make_plan(
                settings_of_one,
                lengths=np.array(rows),
                label_tokens=np.array(rows),
                costs=COSTS[cost](np.array(rows)),
            )
            for ranks in next(iter_steps(step)).ranks:
                yield from ranks


def assert_covered(plan: Plan, cost: str) -> list[MicroBatch]:
    batches = list(every_batch(plan, cost))
    worst, place = worst_micro_batch(plan)
    assert max(b.num_tokens for b in batches) <= worst.num_tokens == place.tokens
    assert max(b.sum_squared_lengths for b in batches) <= worst.sum_squared_lengths
    assert (None, None, None) == (place.epoch, place.step, place.rank)
    assert worst == squarest_micro_batch(plan)
    return batches


few_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=8)
any_case = {
    "lengths": few_lengths,
    "batch": st.integers(1, 6),
    "ranks": st.integers(1, 4),
    "cost": st.sampled_from(sorted(COSTS)),
}


@settings(max_examples=80, deadline=None)
@given(**any_case, budget=st.integers(40, 160))
def test_no_packed_draw_passes_the_worst(lengths, batch, ranks, cost, budget):
    """Tokens and squared lengths of every group, split and bin, by brute force."""
    changes = {"train_batch_size": batch, "data_parallel_size": ranks}
    plan = plan_of(lengths, cost, max_token_len_per_gpu=budget, **changes)
    batches = assert_covered(plan, cost)
    assert worst_micro_batch(plan)[0].num_tokens <= budget
    lower, upper = size_bounds(plan)
    assert lower == max(lengths)
    assert upper >= max(b.num_tokens for b in batches)


@settings(max_examples=80, deadline=None)
@given(**any_case, rows=st.integers(1, 6), pad_to=st.sampled_from(["longest", "max_length", None]))
def test_no_draw_by_rows_passes_the_worst(lengths, batch, ranks, cost, rows, pad_to):
    """Padded to the longest row or to max_length, or rows without padding."""
    plan = plan_of(
        lengths,
        cost,
        micro_batch_size_per_gpu=rows,
        train_batch_size=batch,
        data_parallel_size=ranks,
        use_remove_padding=pad_to is None,
        pad_to=pad_to or "longest",
        max_length=40,
    )
    batches = assert_covered(plan, cost)
    lower, upper = size_bounds(plan)
    assert lower == 1
    assert upper >= max(len(b.lengths) for b in batches)


@settings(max_examples=60, deadline=None)
@given(lengths=few_lengths, batch=st.integers(1, 6), rows=st.integers(1, 6))
def test_on_one_rank_the_worst_padded_draw_is_a_real_one(lengths, batch, rows):
    """The bound costs nothing: some order forms that very micro-batch."""
    plan = plan_of(
        lengths, micro_batch_size_per_gpu=rows, train_batch_size=batch, use_remove_padding=False
    )
    real = {(len(b.lengths), b.padded_to) for b in every_batch(plan, "tokens")}
    worst = worst_micro_batch(plan)[0]
    assert (len(worst.lengths), worst.padded_to) in real


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([6, 5, 5], 10, (6, 4)),  # 5 and 5 have the tokens, 6 alone has most squares of one row
        ([7, 3, 3], 10, (7, 3)),
        ([8, 8, 8], 23, (8, 8)),  # nothing fills what is left
        ([9, 8, 7, 6], 100, (9, 8, 7, 6)),  # the whole global batch
        ([9, 8, 7, 6, 5], 100, (9, 8, 7, 6)),  # the longest rows of one
        ([5], 5, (5,)),
    ],
)
def test_the_worst_packed_rows_are_the_longest_ones(lengths, budget, expected):
    """The last is cut to the fullest sum that rows can have."""
    assert expected == worst_micro_batch(plan_of(lengths, max_token_len_per_gpu=budget))[0].lengths


def test_the_worst_padded_rows_are_the_longest_ones():
    """As many as a micro-batch or the global batch has."""
    lengths = [20, 9, 17, 3, 11]
    for rows, expected in ((2, (20, 17)), (9, (20, 17, 11, 9))):
        plan = plan_of(lengths, micro_batch_size_per_gpu=rows, use_remove_padding=False)
        batch = worst_micro_batch(plan)[0]
        assert (expected, 24) == (batch.lengths, batch.padded_to)


def test_ranks_share_the_global_batch():
    """Equal rows: a rank has its share of them, no more."""
    by_rows = plan_of([10] * 40, micro_batch_size_per_gpu=1, train_batch_size=10)
    assert [10, 5, 4, 3] == [
        size_bounds(replace(by_rows, settings=replace(by_rows.settings, data_parallel_size=ranks)))[
            1
        ]
        for ranks in (1, 2, 3, 4)
    ]
    packed = plan_of(
        [10] * 40, max_token_len_per_gpu=400, train_batch_size=10, data_parallel_size=4
    )
    assert (10, 30) == size_bounds(packed)


def test_a_rank_of_short_rows_may_have_more_tokens_than_its_share():
    """Ranks are balanced by FLOPs: beside one long row stand many short ones."""
    plan = plan_of(
        [100] + [10] * 100,
        "squares",
        max_token_len_per_gpu=2000,
        train_batch_size=101,
        data_parallel_size=2,
    )
    step = next(iter_steps(replace(plan, any_draw=False)))
    real = max(b.num_tokens for ranks in step.ranks for b in ranks)
    assert 1000 == real
    # the bound allows for a further row: the one that a rank gets last
    assert real <= worst_micro_batch(plan)[0].num_tokens <= 1010


def test_a_row_above_the_budget_is_refused():
    """As in any plan."""
    with pytest.raises(PlanError, match="max_token_len_per_gpu=7 is below the longest row, 8"):
        worst_micro_batch(plan_of([8, 3], max_token_len_per_gpu=7))


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    most=st.integers(30, 200),
)
def test_the_largest_sum_is_the_largest_of_all_subsets(lengths, most):
    """Each row is used once."""
    sums = {0}
    for length in lengths:
        sums |= {length + other for other in sums}
    assert max(s for s in sums if s <= most) == largest_sum(np.array(lengths), most)


def test_the_largest_sum_of_many_rows_is_found_at_once():
    """A million rows of ten thousand lengths, and a budget of a million tokens."""
    lengths = np.repeat(np.arange(8, 80_008, 8), 100)
    assert 1_000_000 == largest_sum(lengths, 1_000_007)


def test_a_certificate_of_a_drawn_plan_says_so():
    """And its load is one micro-batch, twice."""
    from trials import trial_of

    plan = plan_of([60, 50, 40, 30, 20], max_token_len_per_gpu=100)
    assert ((60, 40), (60, 40)) == load_of(plan).micro_batches
    certificate = certify(plan, trial_of(load_of(plan)))
    assert ("any_draw", "t001") == (certificate.covers, certificate.proven_by)
    assert (2, 100) == (certificate.worst.rows, certificate.worst.tokens)
    replay = replace(plan, any_draw=False)
    assert "replay" == certify(replay, trial_of(load_of(replay))).covers
