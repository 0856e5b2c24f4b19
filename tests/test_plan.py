"""The laws of the plan: every row once, no budget exceeded, any cut the same step."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autobatch.errors import PlanError
from autobatch.plan.epochs import (
    PlanSettings,
    effective_train_batch_size,
    iter_groups,
    iter_steps,
    make_plan,
    num_epochs,
    num_steps,
    order_hash,
    plan_hash,
    split_over_ranks,
    step_plan,
    steps_per_epoch,
)
from autobatch.plan.microbatches import MicroBatch, cut_by_rows, pack_by_tokens
from autobatch.plan.worst import (
    count_micro_batches,
    real_tokens_per_run,
    size_bounds,
    worst_micro_batch,
)

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=40)
PACKED = PlanSettings(
    train_batch_size=4,
    data_parallel_size=2,
    seed=0,
    total_epochs=1,
    total_training_steps=None,
    max_token_len_per_gpu=64,
    micro_batch_size_per_gpu=None,
    use_remove_padding=True,
)
PADDED = dataclasses.replace(
    PACKED, max_token_len_per_gpu=None, micro_batch_size_per_gpu=2, use_remove_padding=False
)


def plan_of(lengths, base=PACKED, *, labels=None, costs=None, **changes):
    """Return a plan over rows of these lengths, every token a label unless told."""
    return make_plan(
        dataclasses.replace(base, **changes),
        lengths=np.array(lengths),
        label_tokens=np.array(lengths if labels is None else labels),
        costs=None if costs is None else np.array(costs),
    )


@st.composite
def plans(draw):
    """Draw plans of every form over one to forty rows, some without labels."""
    lengths = draw(LENGTHS)
    labels = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    labels[draw(st.integers(0, len(lengths) - 1))] = 1
    base = draw(st.sampled_from([PACKED, PADDED]))
    size = draw(st.integers(64, 200) if base is PACKED else st.integers(1, 9))
    key = "max_token_len_per_gpu" if base is PACKED else "micro_batch_size_per_gpu"
    return plan_of(
        lengths,
        base,
        labels=labels,
        train_batch_size=draw(st.integers(1, 50)),
        data_parallel_size=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 5)),
        total_epochs=draw(st.integers(1, 3)),
        **{key: size},
    )


def real_micro_batches(step):
    """Return the micro-batches of a step that are no fillers."""
    return [batch for rank in step.ranks for batch in rank if not batch.is_filler]


# ---- micro-batches -----------------------------------------------------------


@given(LENGTHS, st.integers(64, 200))
def test_packing_takes_every_row_once(lengths, budget):
    """No row is lost or doubled."""
    packed = pack_by_tokens(lengths, budget)
    assert list(range(len(lengths))) == sorted(row for rows in packed for row in rows)


@given(LENGTHS, st.integers(64, 200))
def test_packing_never_exceeds_the_budget(lengths, budget):
    """The tokens of a bin are at most the budget."""
    bins = pack_by_tokens(lengths, budget)
    assert all(sum(lengths[i] for i in rows) <= budget for rows in bins)


def test_packing_puts_a_row_into_the_fullest_bin_that_holds_it():
    """Best fit, longest row first."""
    assert [[1, 2], [0, 3]] == pack_by_tokens([5, 6, 4, 3], 10)


def test_a_row_of_exactly_the_budget_fits():
    """The budget itself is allowed."""
    assert [[0]] == pack_by_tokens([64], 64)


def test_a_row_above_the_budget_is_refused_with_the_next_move():
    """The error names the value, the rule, the next move."""
    with pytest.raises(PlanError) as caught:
        pack_by_tokens([10, 2311], 2048)
    assert (
        "max_token_len_per_gpu=2048 is below the longest row, 2311 tokens; "
        "use 2312 or more, or max_length=2048 data.truncation=drop"
    ) == str(caught.value)


def test_rows_are_cut_longest_first_with_an_uneven_last_chunk():
    """Similar lengths share a micro-batch; ties stay in order."""
    assert [[1, 3], [0, 2], [4]] == cut_by_rows([5, 9, 5, 6, 1], 2)


def test_padded_tokens_count_as_computed():
    """Rows x padded length are computed, only the rows are real."""
    batch = MicroBatch(samples=(0, 1), lengths=(5, 3), padded_to=8)
    assert (16, 8, 128) == (batch.num_tokens, batch.num_real_tokens, batch.sum_squared_lengths)


def test_packed_tokens_are_all_real():
    """Without padding the squares are those of the rows."""
    batch = MicroBatch(samples=(0, 1), lengths=(5, 3), padded_to=None)
    assert (8, 8, 34) == (batch.num_tokens, batch.num_real_tokens, batch.sum_squared_lengths)


# ---- steps -------------------------------------------------------------------


@given(plans())
def test_every_trainable_sample_runs_once_an_epoch(plan):
    """Samples without labels never run."""
    seen = Counter()
    for step in iter_steps(plan):
        for batch in real_micro_batches(step):
            seen.update((step.epoch, sample) for sample in batch.samples)
    expected = Counter((e, s) for e in range(num_epochs(plan)) for s in plan.trainable.tolist())
    assert expected == seen


@given(plans())
def test_no_micro_batch_exceeds_its_size(plan):
    """Neither the token budget nor the row count is passed, fillers included."""
    budget, rows = plan.settings.max_token_len_per_gpu, plan.settings.micro_batch_size_per_gpu
    batches = [batch for step in iter_steps(plan) for rank in step.ranks for batch in rank]
    if budget:
        assert all(batch.num_tokens <= budget for batch in batches)
    else:
        assert all(len(batch.samples) <= rows for batch in batches)


@given(plans())
def test_all_ranks_run_the_same_number_of_micro_batches(plan):
    """Collectives of the ranks stay in step."""
    assert all(
        1 == len({len(rank) for rank in step.ranks}) and step.ranks[0] for step in iter_steps(plan)
    )


@given(plans())
def test_fillers_only_even_out(plan):
    """The busiest rank has none; the others have them last."""
    for step in iter_steps(plan):
        flags = [[batch.is_filler for batch in rank] for rank in step.ranks]
        assert any(not any(rank) for rank in flags)
        assert all(rank == sorted(rank) for rank in flags)


@given(plans())
def test_a_filler_is_the_shortest_row_of_the_step(plan):
    """A filler costs as little as any real row could."""
    for step in iter_steps(plan):
        shortest = min(min(batch.lengths) for batch in real_micro_batches(step))
        fillers = [batch for rank in step.ranks for batch in rank if batch.is_filler]
        assert all((shortest,) == batch.lengths for batch in fillers)


@given(plans(), st.integers(1, 5), st.integers(1, 9))
def test_groups_do_not_depend_on_ranks_or_cut(plan, num_ranks, rows):
    """Any tuning steps over the same samples in the same order."""
    other = make_plan(
        dataclasses.replace(
            plan.settings,
            data_parallel_size=num_ranks,
            max_token_len_per_gpu=None,
            micro_batch_size_per_gpu=rows,
        ),
        lengths=plan.lengths,
        label_tokens=plan.label_tokens,
    )

    def groups(any_plan):
        return [
            (step.epoch, step.num_label_tokens, sorted(sum((b.samples for b in batches), ())))
            for step in iter_steps(any_plan)
            for batches in [real_micro_batches(step)]
        ]

    assert groups(plan) == groups(other)
    assert order_hash(plan) == order_hash(other)


@given(plans(), st.data())
def test_any_step_can_be_asked_for_alone(plan, data):
    """Random access gives the step that iteration gives."""
    index = data.draw(st.integers(0, num_steps(plan) - 1))
    assert list(iter_steps(plan))[index] == step_plan(plan, index)


def test_the_label_tokens_of_a_step_are_counted_over_all_ranks():
    """Fillers add none."""
    plan = plan_of([8] * 5, labels=[1, 2, 3, 4, 5], train_batch_size=5, data_parallel_size=3)
    assert 15 == step_plan(plan, 0).num_label_tokens


def test_ranks_are_balanced_by_cost():
    """The dearest row goes to the idlest rank, ties to the lowest."""
    assert [[2, 3], [0, 1]] == split_over_ranks([5, 4, 7, 1], 2)


def test_costs_and_not_lengths_balance_the_ranks():
    """One dear row stands against three cheap ones."""
    plan = plan_of([8] * 4, costs=[9, 3, 3, 3])
    rows = [sum(len(batch.samples) for batch in r) for r in step_plan(plan, 0).ranks]
    assert [1, 3] == sorted(rows)


def test_a_rank_without_rows_runs_fillers():
    """A last group smaller than the ranks leaves nobody waiting."""
    plan = plan_of([8, 9, 10], data_parallel_size=4)
    assert [False, False, False, True] == [r[0].is_filler for r in step_plan(plan, 0).ranks]


def test_the_last_partial_group_is_a_step_of_its_own():
    """Ten rows by four are steps of four, four, two."""
    plan = plan_of([8] * 10)
    assert [4, 4, 2] == [len(group) for _, _, group in iter_groups(plan)]


def test_the_batch_is_lowered_to_the_trainable_samples():
    """A batch larger than the data is the data."""
    plan = plan_of([8, 8, 8], labels=[1, 0, 1], train_batch_size=256)
    assert (2, 1) == (effective_train_batch_size(plan), steps_per_epoch(plan))


@pytest.mark.parametrize(
    ("steps", "epochs", "expected"), [(None, 2, (6, 2)), (2, 2, (2, 1)), (7, 2, (7, 3))]
)
def test_total_training_steps_overrides_epochs(steps, epochs, expected):
    """Fewer stop early, more add epochs."""
    plan = plan_of([8] * 10, total_training_steps=steps, total_epochs=epochs)
    assert expected == (num_steps(plan), num_epochs(plan))


def test_padding_goes_to_a_multiple_of_eight():
    """The longest of the micro-batch is rounded up; a multiple stays."""
    plan = plan_of([16, 9, 8, 3], PADDED, data_parallel_size=1)
    assert [16, 8] == [batch.padded_to for batch in step_plan(plan, 0).ranks[0]]


def test_padding_to_max_length_is_exact():
    """Fillers too, whatever the multiple of eight."""
    plan = plan_of([9, 5, 4], PADDED, pad_to="max_length", max_length=21)
    assert {21} == {b.padded_to for rank in step_plan(plan, 0).ranks for b in rank}


def test_rows_can_be_packed_by_count():
    """A row count without padding has no padded length."""
    plan = plan_of([9, 5], PADDED, use_remove_padding=True)
    assert None is step_plan(plan, 0).ranks[0][0].padded_to


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch_size_per_gpu": 2},
        {"max_token_len_per_gpu": None},
        {"max_token_len_per_gpu": 0},
        {"use_remove_padding": False},
        {"train_batch_size": 0},
        {"data_parallel_size": 0},
        {"total_epochs": 0},
        {"total_training_steps": 0},
        {"seed": -1},
        {"pad_to": "longer"},
        {"pad_to": "max_length"},
    ],
)
def test_impossible_settings_are_refused(changes):
    """Every impossible value is one sentence with a next move."""
    with pytest.raises(PlanError, match=r"; .*(use|set) "):
        plan_of([8], **changes)


def test_data_without_labels_is_refused():
    """Nothing to learn is said before anything runs."""
    with pytest.raises(PlanError, match="none of the 2 samples has a label token"):
        plan_of([8, 8], labels=[0, 0])


def test_a_row_above_max_length_cannot_be_padded_to_it():
    """The longest row is named."""
    with pytest.raises(PlanError, match="max_length=8 is below the longest row, 9 tokens"):
        plan_of([9, 5], PADDED, pad_to="max_length", max_length=8)


def test_a_small_budget_names_the_longest_row_of_all_steps():
    """Raising the budget once is enough, whichever step is asked for."""
    plan = plan_of([50, 60, 70, 80], train_batch_size=1, max_token_len_per_gpu=49)
    with pytest.raises(PlanError, match="the longest row, 80 tokens"):
        step_plan(plan, 0)


# ---- hashes ------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        plan_of([8, 9, 11]),
        plan_of([8, 9, 10, 10]),
        plan_of([8, 9, 10], labels=[8, 9, 9]),
        plan_of([8, 9, 10], seed=1),
        plan_of([8, 9, 10], max_token_len_per_gpu=65),
        plan_of([8, 9, 10], train_batch_size=2),
        plan_of([8, 9, 10], data_parallel_size=1),
        plan_of([8, 9, 10], total_epochs=2),
        plan_of([8, 9, 10], PADDED),
    ],
)
def test_the_plan_hash_changes_with_the_plan(other):
    """Lengths, labels, seed, sizes, ranks, epochs: each counts."""
    assert plan_hash(plan_of([8, 9, 10])) != plan_hash(other)


@given(LENGTHS, st.data())
def test_the_plan_hash_changes_with_any_length(lengths, data):
    """One token more in one row is another plan."""
    changed = list(lengths)
    changed[data.draw(st.integers(0, len(lengths) - 1))] += 1
    first, second = (plan_of(values, max_token_len_per_gpu=65) for values in (lengths, changed))
    assert plan_hash(first) != plan_hash(second)


@pytest.mark.parametrize(
    "other",
    [
        plan_of([8, 9, 11]),
        plan_of([8, 9, 10], labels=[8, 9, 9]),
        plan_of([8, 9, 10], seed=1),
        plan_of([8, 9, 10], train_batch_size=2),
    ],
)
def test_the_order_hash_changes_with_what_is_learned(other):
    """Lengths, labels, seed, batch size: each counts."""
    assert order_hash(plan_of([8, 9, 10])) != order_hash(other)


def test_the_order_hash_lets_a_run_go_on_for_longer():
    """More epochs begin with the same steps."""
    assert order_hash(plan_of([8, 9, 10])) == order_hash(plan_of([8, 9, 10], total_epochs=5))


def test_the_hashes_are_the_same_in_another_process():
    """Nothing of this process leaks into a hash."""
    code = (
        "from tests.test_plan import *; plan = plan_of([8, 9, 10]);"
        "print(plan_hash(plan), order_hash(plan))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=True,
    )
    plan = plan_of([8, 9, 10])
    assert [plan_hash(plan), order_hash(plan)] == answer.stdout.split()


# ---- extremes ----------------------------------------------------------------


@given(plans())
def test_the_worst_micro_batch_is_found_where_it_is_said_to_run(plan):
    """No micro-batch has more computed tokens; its place is exact."""
    batch, worst = worst_micro_batch(plan)
    step = step_plan(plan, worst.step)
    assert batch in step.ranks[worst.rank]
    assert (step.epoch, len(batch.samples)) == (worst.epoch, worst.rows)
    all_batches = [b for s in iter_steps(plan) for rank in s.ranks for b in rank]
    assert max(b.num_tokens for b in all_batches) == batch.num_tokens == worst.tokens
    assert len(all_batches) == count_micro_batches(plan)


def test_of_equal_tokens_the_longer_rows_are_worse():
    """Attention grows with the square."""
    plan = plan_of([32, 32, 64], train_batch_size=3, data_parallel_size=2)
    assert (64,) == worst_micro_batch(plan)[0].lengths


@settings(max_examples=50)
@given(plans())
def test_no_size_above_the_bounds_changes_the_cut(plan):
    """At the upper bound every rank runs one micro-batch; at the lower the plan is valid."""
    by_rows = plan.settings.micro_batch_size_per_gpu is not None
    key = "micro_batch_size_per_gpu" if by_rows else "max_token_len_per_gpu"
    smallest, largest = size_bounds(plan)

    def sized(size):
        return make_plan(
            dataclasses.replace(plan.settings, **{key: size}),
            lengths=plan.lengths,
            label_tokens=plan.label_tokens,
        )

    assert all(1 == len(step.ranks[0]) for step in iter_steps(sized(largest)))
    assert count_micro_batches(sized(smallest)) >= count_micro_batches(sized(largest))
    assert (smallest, largest) == size_bounds(sized(1))


def test_one_less_than_the_upper_bound_cuts_once_more():
    """The bound is exact."""
    plan = plan_of([8, 9, 10], train_batch_size=3, data_parallel_size=1)
    smallest, largest = size_bounds(plan)
    plan = plan_of(
        [8, 9, 10], train_batch_size=3, data_parallel_size=1, max_token_len_per_gpu=largest - 1
    )
    assert ((10, 27), 2) == ((smallest, largest), count_micro_batches(plan))


@given(plans(), st.integers(1, 9))
def test_real_tokens_are_those_of_the_rows_that_run(plan, steps):
    """Neither padding nor fillers count, the last epoch only as far as it goes."""
    plan = make_plan(
        dataclasses.replace(plan.settings, total_training_steps=steps),
        lengths=plan.lengths,
        label_tokens=plan.label_tokens,
    )
    expected = sum(
        batch.num_real_tokens for step in iter_steps(plan) for batch in real_micro_batches(step)
    )
    assert expected == real_tokens_per_run(plan)


def test_a_hundred_thousand_rows_take_seconds():
    """The plan is replayed at every launch."""
    lengths = np.random.default_rng(0).integers(16, 1024, 100_000)
    plan = plan_of(lengths, train_batch_size=256, max_token_len_per_gpu=4096)
    start = time.process_time()
    plan_hash(plan)
    assert time.process_time() - start < 3
