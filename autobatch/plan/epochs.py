"""From a seed to every micro-batch of the run, step by step, rank by rank."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autobatch.plan.microbatches import (
    MicroBatch,
    check_longest_row,
    cut_by_rows,
    pack_by_tokens,
)
from autobatch.plan.settings import (
    PAD_MULTIPLE,
    Plan,
    PlanSettings,
    effective_train_batch_size,
    make_plan,
    num_epochs,
    num_steps,
    steps_per_epoch,
)
from autobatch.units import round_up

__all__ = [
    "Plan",
    "PlanSettings",
    "StepPlan",
    "effective_train_batch_size",
    "iter_groups",
    "iter_steps",
    "make_plan",
    "num_epochs",
    "num_steps",
    "order_hash",
    "plan_hash",
    "split_over_ranks",
    "step_plan",
    "steps_per_epoch",
]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step: the micro-batches of each rank, the same number on every rank."""

    index: int  # from 0, over the whole run
    epoch: int
    num_label_tokens: int  # over all ranks, without fillers
    ranks: tuple[tuple[MicroBatch, ...], ...]


def iter_groups(plan: Plan, start: int = 0) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield (step index, epoch, sample indices (num_rows,) int64) of each step from `start` on.

    Groups know nothing of ranks or micro-batches: the same for any cut.
    """
    size, in_epoch = effective_train_batch_size(plan), steps_per_epoch(plan)
    epoch, order = -1, plan.trainable
    for index in range(start, num_steps(plan)):
        if index // in_epoch != epoch:
            epoch = index // in_epoch
            order = _epoch_order(plan, epoch)
        first = index % in_epoch * size
        yield index, epoch, order[first : first + size]


def _epoch_order(plan: Plan, epoch: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64([plan.settings.seed, epoch]))
    return generator.permutation(plan.trainable)


def iter_steps(plan: Plan, start: int = 0) -> Iterator[StepPlan]:
    """Yield the steps of the run, from the step of index `start` on.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    if plan.settings.max_token_len_per_gpu is not None:
        longest = int(plan.lengths[plan.trainable].max())
        check_longest_row(longest, plan.settings.max_token_len_per_gpu)
    for index, epoch, group in iter_groups(plan, start):
        yield _cut_step(plan, index, epoch, group)


def step_plan(plan: Plan, index: int) -> StepPlan:
    """Return one step of the run; `iter_steps` is faster for many in a row.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    assert 0 <= index < num_steps(plan)
    return next(iter_steps(plan, index))


def split_over_ranks(costs: list[int], data_parallel_size: int) -> list[list[int]]:
    """Return the positions of each rank, balanced by cost.

    Longest processing time first: the dearest row to the rank with the least cost so far, ties
    to the lowest rank. Source: Graham, SIAM J. Appl. Math. 17 (1969).
    """
    ranks: list[list[int]] = [[] for _ in range(data_parallel_size)]
    heap = [(0, rank) for rank in range(data_parallel_size)]
    for position in sorted(range(len(costs)), key=lambda position: -costs[position]):
        load, rank = heap[0]
        ranks[rank].append(position)
        heapq.heapreplace(heap, (load + costs[position], rank))
    return ranks


def _cut_step(plan: Plan, index: int, epoch: int, group: np.ndarray) -> StepPlan:
    settings = plan.settings
    samples: list[int] = group.tolist()
    lengths: list[int] = plan.lengths[group].tolist()
    cuts = []
    for rows in split_over_ranks(plan.costs[group].tolist(), settings.data_parallel_size):
        row_lengths = [lengths[row] for row in rows]
        if settings.max_token_len_per_gpu is not None:
            cut = pack_by_tokens(row_lengths, settings.max_token_len_per_gpu)
        else:
            assert settings.micro_batch_size_per_gpu is not None
            cut = cut_by_rows(row_lengths, settings.micro_batch_size_per_gpu)
        cuts.append(
            [
                _micro_batch(
                    settings, [samples[rows[i]] for i in part], [row_lengths[i] for i in part]
                )
                for part in cut
            ]
        )
    shortest, sample = min(zip(lengths, samples, strict=True))
    filler = _micro_batch(settings, [sample], [shortest], is_filler=True)
    most = max(map(len, cuts))
    return StepPlan(
        index=index,
        epoch=epoch,
        num_label_tokens=int(plan.label_tokens[group].sum()),
        ranks=tuple((*cut, *[filler] * (most - len(cut))) for cut in cuts),
    )


def _micro_batch(
    settings: PlanSettings, samples: list[int], lengths: list[int], is_filler: bool = False
) -> MicroBatch:
    padded_to = None
    if not settings.use_remove_padding:
        if settings.pad_to == "max_length":
            padded_to = settings.max_length
        else:
            padded_to = round_up(max(lengths), PAD_MULTIPLE)
    return MicroBatch(
        samples=tuple(samples), lengths=tuple(lengths), padded_to=padded_to, is_filler=is_filler
    )


def plan_hash(plan: Plan) -> str:
    """Return the sha256 of every micro-batch of the run, in hexadecimal.

    Equal in every process; differs with any sample, length, size, seed, rank count or step.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    settings = plan.settings
    digest = _digest(
        {
            "train_batch_size": effective_train_batch_size(plan),
            "data_parallel_size": settings.data_parallel_size,
            "seed": settings.seed,
            "num_steps": num_steps(plan),
            "max_token_len_per_gpu": settings.max_token_len_per_gpu,
            "micro_batch_size_per_gpu": settings.micro_batch_size_per_gpu,
            "use_remove_padding": settings.use_remove_padding,
        }
    )
    for step in iter_steps(plan):
        # counts come before what they count, so that no two plans give the same words
        words = [step.index, step.epoch, step.num_label_tokens, len(step.ranks)]
        for micro_batches in step.ranks:
            words.append(len(micro_batches))
            for batch in micro_batches:
                padded_to = -1 if batch.padded_to is None else batch.padded_to
                words += (len(batch.samples), padded_to, batch.is_filler)
                words += batch.samples
                words += batch.lengths
        digest.update(np.array(words, dtype="<i8").tobytes())
    return digest.hexdigest()


def order_hash(plan: Plan) -> str:
    """Return the sha256 of what is learned in which order, in hexadecimal.

    Covers seed, groups, lengths and label tokens; not the ranks, the cut into micro-batches or
    the length of the run. A checkpoint goes on wherever this hash is the same. The first epoch
    is hashed row by row; the later ones follow from the seed in the same way.
    """
    digest = _digest(
        {"seed": plan.settings.seed, "train_batch_size": effective_train_batch_size(plan)}
    )
    order = _epoch_order(plan, 0)
    for values in (order, plan.lengths[order], plan.label_tokens[order]):
        digest.update(values.astype("<i8").tobytes())
    return digest.hexdigest()


def _digest(settings: dict[str, int | bool | None]) -> hashlib._Hash:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
