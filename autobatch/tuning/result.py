"""What a search found: the winner, and what became of every toggle set."""

from __future__ import annotations

from dataclasses import dataclass

from autobatch.records import Candidate, Toggles, Trial


@dataclass(frozen=True, kw_only=True)
class SearchedSet:
    """What became of one toggle set."""

    name: str
    toggles: Toggles
    stopped_by: str  # oom | cap | plateau | time
    smallest: Candidate  # the smallest size there is
    largest: int | None  # the largest size that fitted; None: not even the smallest
    best_trial_id: str | None
    tokens_per_sec: float | None  # of the best, estimated for the whole run


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The verdict with everything it rests on; speeds are real tokens per second of the run."""

    winner: Trial
    tokens_per_sec: dict[str, float]  # by trial_id: every candidate that fitted
    trials: tuple[Trial, ...]
    searched: tuple[SearchedSet, ...]
    fallbacks: tuple[Trial, ...]  # the next best, fastest first
    stopped_by: str  # of the winner's toggle set
    binding: str  # memory | global_batch | host
    reason: str
    left_out: dict[str, str]  # toggle key or name of a set -> why not tried
    seconds: float
