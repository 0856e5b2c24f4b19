"""The settings of a run, bound to the samples that they plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autobatch.errors import PlanError
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
    any_draw: bool = False  # the order is not known: its extremes hold for every seed


def make_plan(
    settings: PlanSettings,
    *,
    lengths: np.ndarray,
    label_tokens: np.ndarray,
    costs: np.ndarray | None = None,
    any_draw: bool = False,
) -> Plan:
    """Return the plan of a run over the samples that have a label token.

    A token budget below the longest row is refused when the first step is asked for, so that
    `size_bounds` can be asked of any plan. With `any_draw` the extremes of the plan are those of
    every order of the rows, the steps those of this seed; a longer row must not cost less.

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
        any_draw=any_draw,
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
