"""From a seed to every micro-batch of the run, step by step, rank by rank."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autobatch.errors import PlanError
from autobatch.plan.microbatches import (
    MicroBatch,
    check_longest_row,
    cut_by_rows,
    pack_by_tokens,
)
from autobatch.units import round_up

PAD_MULTIPLE = 8  # rows are padded to a multiple of this many tokens


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """What decides the order of the samples, their groups, and the cut of the groups.

    Exactly one of `max_token_len_per_gpu` (padding-free) and `micro_batch_size_per_gpu`.
    """

    train_batch_size: int  # rows of an optimizer step over all ranks
    data_parallel_size: int
    seed: int
    total_epochs: int
    total_training_steps: int | None  # overrides total_epochs
    max_token_len_per_gpu: int | None
    micro_batch_size_per_gpu: int | None
    use_remove_padding: bool
    pad_to: str = "longest"  # longest | max_length
    max_length: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Settings with the facts of the samples that they are applied to.

    All arrays are int64; `lengths`, `label_tokens`, `costs` have one value for each sample of
    the cache, in tokens after the cut; `costs` is the weight by which ranks are balanced.
    """

    settings: PlanSettings
    lengths: np.ndarray
    label_tokens: np.ndarray
    trainable: np.ndarray  # indices of the samples with a label token
    costs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step: the micro-batches of each rank, the same number on every rank."""

    index: int  # from 0, over the whole run
    epoch: int
    num_label_tokens: int  # over all ranks, without fillers
    ranks: tuple[tuple[MicroBatch, ...], ...]


def make_plan(
    settings: PlanSettings,
    *,
    lengths: np.ndarray,
    label_tokens: np.ndarray,
    costs: np.ndarray | None = None,
) -> Plan:
    """Return the plan of a run over the samples that have a label token.

    A token budget below the longest row is refused when the first step is asked for, so that
    `size_bounds` can be asked of any plan.

    Raises:
        PlanError: if a setting is impossible or no sample has a label token.
    """
    _check_settings(settings)
    as_int64 = [
        np.ascontiguousarray(values, dtype=np.int64)
        for values in (lengths, label_tokens, lengths if costs is None else costs)
    ]
    assert as_int64[0].ndim == 1
    assert len({values.shape for values in as_int64}) == 1
    trainable = np.flatnonzero(as_int64[1] > 0).astype(np.int64)
    if not len(trainable):
        raise PlanError(
            f"none of the {len(as_int64[0])} samples has a label token, so there is nothing to "
            "learn; check the data keys, or raise max_length if the answers were cut off"
        )
    if settings.pad_to == "max_length" and not settings.use_remove_padding:
        longest = int(as_int64[0][trainable].max())
        assert settings.max_length is not None
        if longest > settings.max_length:
            raise PlanError(
                f"max_length={settings.max_length} is below the longest row, {longest} tokens; "
                f"use {round_up(longest, PAD_MULTIPLE)} or more, or data.truncation=drop"
            )
    return Plan(
        settings=settings,
        lengths=as_int64[0],
        label_tokens=as_int64[1],
        trainable=trainable,
        costs=as_int64[2],
    )


def _check_settings(settings: PlanSettings) -> None:
    for name in ("train_batch_size", "data_parallel_size", "total_epochs"):
        if getattr(settings, name) < 1:
            raise PlanError(f"{name}={getattr(settings, name)} is below 1; use 1 or more")
    for name in ("total_training_steps", "max_token_len_per_gpu", "micro_batch_size_per_gpu"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise PlanError(f"{name}={value} is below 1; use 1 or more, or null")
    if settings.seed < 0:
        raise PlanError(f"seed={settings.seed} is negative; use 0 or more")
    budget, rows = settings.max_token_len_per_gpu, settings.micro_batch_size_per_gpu
    forms = (
        "set max_token_len_per_gpu with use_remove_padding=true, or micro_batch_size_per_gpu alone"
    )
    if (budget is None) == (rows is None):
        raise PlanError(
            f"max_token_len_per_gpu={budget} with micro_batch_size_per_gpu={rows}: "
            f"exactly one size is needed; {forms}"
        )
    if budget is not None and not settings.use_remove_padding:
        raise PlanError(
            f"max_token_len_per_gpu={budget} needs rows without padding, but "
            f"use_remove_padding=false; {forms}"
        )
    if settings.pad_to not in ("longest", "max_length"):
        raise PlanError(f"pad_to={settings.pad_to!r} is unknown; use longest or max_length")
    if settings.pad_to == "max_length" and settings.max_length is None:
        raise PlanError("pad_to=max_length has no max_length to pad to; set max_length")


def effective_train_batch_size(plan: Plan) -> int:
    """Return train_batch_size, lowered to the number of trainable samples."""
    return min(plan.settings.train_batch_size, len(plan.trainable))


def steps_per_epoch(plan: Plan) -> int:
    """Return the optimizer steps of an epoch; the last may be smaller than the others."""
    return -(-len(plan.trainable) // effective_train_batch_size(plan))


def num_steps(plan: Plan) -> int:
    """Return the optimizer steps of the run."""
    if plan.settings.total_training_steps is not None:
        return plan.settings.total_training_steps
    return plan.settings.total_epochs * steps_per_epoch(plan)


def num_epochs(plan: Plan) -> int:
    """Return the epochs that the run enters, the last perhaps in part."""
    return -(-num_steps(plan) // steps_per_epoch(plan))


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
