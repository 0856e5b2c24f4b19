"""The extremes of a plan: its worst micro-batch, its counts, the sizes worth trying."""

from __future__ import annotations

from autobatch.plan.draws import size_bounds_of_any_draw, worst_of_any_draw
from autobatch.plan.epochs import iter_groups, iter_steps, split_over_ranks
from autobatch.plan.microbatches import MicroBatch
from autobatch.plan.settings import Plan, num_epochs, num_steps, steps_per_epoch
from autobatch.records import WorstMicroBatch


def worst_micro_batch(plan: Plan) -> tuple[MicroBatch, WorstMicroBatch]:
    """Return the micro-batch of the run that needs most memory, and where it runs.

    Most computed tokens (padded: rows x padded length), ties by the sum of squared lengths,
    then the first. Of any draw: one that none passes, which runs at no certain place.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    if plan.any_draw:
        batch = worst_of_any_draw(plan)
        return batch, WorstMicroBatch(
            epoch=None, step=None, rank=None, rows=len(batch.lengths), tokens=batch.num_tokens
        )
    worst: tuple[MicroBatch, int, int, int] | None = None
    most = (0, 0)
    for step in iter_steps(plan):
        for rank, micro_batches in enumerate(step.ranks):
            for batch in micro_batches:
                num_tokens = batch.num_tokens
                if num_tokens < most[0]:
                    continue
                size = (num_tokens, batch.sum_squared_lengths)
                if size > most:
                    most, worst = size, (batch, step.epoch, step.index, rank)
    assert worst is not None
    batch, epoch, index, rank = worst
    return batch, WorstMicroBatch(
        epoch=epoch, step=index, rank=rank, rows=len(batch.samples), tokens=batch.num_tokens
    )


def squarest_micro_batch(plan: Plan) -> MicroBatch:
    """Return the micro-batch with the largest sum of squared lengths, ties by most tokens.

    Attention with a sliding window or capped scores takes memory by length squared, so a few long
    rows can need more than many short ones of more tokens.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    if plan.any_draw:
        return worst_of_any_draw(plan)
    batches = (batch for step in iter_steps(plan) for rank in step.ranks for batch in rank)
    return max(batches, key=lambda batch: (batch.sum_squared_lengths, batch.num_tokens))


def count_micro_batches(plan: Plan) -> int:
    """Return the micro-batches of the run over all steps and ranks, fillers included.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    return sum(len(batches) for step in iter_steps(plan) for batches in step.ranks)


def size_bounds(plan: Plan) -> tuple[int, int]:
    """Return the smallest and the largest useful size, whatever size the plan has now.

    Rows: 1, and the most rows of one rank in any step. Token budget: the longest trainable row,
    and the most tokens of one rank in any step. A larger size would change no micro-batch.
    """
    if plan.any_draw:
        return size_bounds_of_any_draw(plan)
    by_rows = plan.settings.micro_batch_size_per_gpu is not None
    longest = int(plan.lengths[plan.trainable].max())
    most = 1 if by_rows else longest
    for _, _, group in iter_groups(plan):
        ranks = split_over_ranks(plan.costs[group].tolist(), plan.settings.data_parallel_size)
        if by_rows:
            most = max(most, *map(len, ranks))
        else:
            lengths = plan.lengths[group].tolist()
            most = max(most, *(sum(lengths[row] for row in rows) for rows in ranks))
    return (1 if by_rows else longest), most


def real_tokens_per_run(plan: Plan) -> int:
    """Return the tokens of all rows of the run, without padding and fillers."""
    whole, rest = divmod(num_steps(plan), steps_per_epoch(plan))
    tokens = whole * int(plan.lengths[plan.trainable].sum())
    if rest:
        start = (num_epochs(plan) - 1) * steps_per_epoch(plan)
        tokens += sum(int(plan.lengths[group].sum()) for _, _, group in iter_groups(plan, start))
    return tokens
