"""How a search spends its seconds: turns, first sizes, timeouts, what is worth going on with.

Screening gives every toggle set one trial, or more where they are cheap, in about 60 % of the
time; the rest goes to the sets that may still win, the fastest first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median

from autobatch.records import Toggles, Trial
from autobatch.tuning.result import SearchedSet
from autobatch.tuning.speed import steps_secs

SCREENING_FRACTION = 0.6
WORTH_FRACTION = 0.75  # of the leader's speed after screening: slower sets need no exact limit
MIN_TIMEOUT_SECS = 30.0  # a trial is hanging after this, or ten times its predicted time
TIMEOUT_FACTOR = 10.0
FIRST_TIMEOUT_SECS = 900.0  # of a trial that nothing predicts: a large model is built in it
SCREENED_TIMEOUT_SECS = 60.0  # of a set's first trial once another set fitted, at least
SCREENED_TIMEOUT_FACTOR = 3.0  # of its share of the time, or of what the others' trials took


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The time of one toggle set, on the search's clock."""

    first_ends: float  # of trials before one fitted
    ends: float  # of further ones
    share_secs: float


def turn(*, now: float, until: float, num_left: int) -> Turn:
    """Return an equal share of the time left; a first trial may take what the others leave."""
    share_secs = max(0.0, until - now) / num_left
    return Turn(first_ends=until, ends=now + share_secs, share_secs=share_secs)


def starts_child(last: Trial | None, toggles: Toggles, *, device: str) -> bool:
    """Return whether a trial starts processes: another toggle set, or the last trial ended them.

    An out-of-memory ends them except on the CPU for a rank that is alone.
    """
    if last is None or last.candidate.toggles != toggles:
        return True
    ends_by_oom = (
        device == "cuda" or last.data_parallel_size > 1 or last.simulated_ranks is not None
    )
    return last.outcome in ("timeout", "error") or (last.outcome == "oom" and ends_by_oom)


def start_secs(trials: Sequence[Trial], *, device: str) -> float:
    """Return the usual seconds that a trial spends on the start of its processes; unknown: 0."""
    overheads = [
        trial.seconds - steps_secs(trial)
        for last, trial in pairwise((None, *trials))
        if trial is not None
        and trial.outcome == "ok"
        and starts_child(last, trial.candidate.toggles, device=device)
    ]
    return median(overheads) if overheads else 0.0


def timeout_secs(*, expected: float) -> float:
    """Return when a trial of a set that made its steps before counts as hanging."""
    return max(MIN_TIMEOUT_SECS, TIMEOUT_FACTOR * expected)


def first_timeout_secs(*, share_secs: float, expected: float | None) -> float:
    """Return when a set's first trial counts as hanging.

    `expected`: seconds by the trials of other sets; None if nothing fitted yet.
    """
    if expected is None:
        return FIRST_TIMEOUT_SECS
    most = SCREENED_TIMEOUT_FACTOR * max(share_secs, expected)
    return min(FIRST_TIMEOUT_SECS, max(SCREENED_TIMEOUT_SECS, most))


def first_size(*, lower: int, upper: int, device: str) -> int:
    """Return where the first set of a form starts.

    On a GPU a start costs more than steps: a size large enough to tell the speed.
    """
    return lower if device == "cpu" else max(lower, upper // 4)


def worth_going_on(searched: Iterable[SearchedSet], *, leader: float) -> list[SearchedSet]:
    """Return the sets that time cut short and that may still win, the fastest first.

    `leader`: the best tokens per second after screening. Sets of unknown speed come last.
    """
    cut = [
        s
        for s in searched
        if s.stopped_by == "time"
        and (s.tokens_per_sec is None or s.tokens_per_sec >= WORTH_FRACTION * leader)
    ]
    return sorted(cut, key=lambda s: -(s.tokens_per_sec or 0.0))


def agreed(sets: Sequence[Toggles]) -> frozenset[str]:
    """Return the names of the toggles that have one value in all the sets."""
    return frozenset(
        f.name for f in fields(Toggles) if len({getattr(toggles, f.name) for toggles in sets}) == 1
    )


def most_different_first(sets: Sequence[Toggles], toggles: Toggles) -> list[Toggles]:
    """Return the sets with the one that has least in common with `toggles` moved to the front."""
    if not sets:
        return []
    other = min(sets, key=lambda s: len(agreed((s, toggles))))
    return [other, *(s for s in sets if s != other)]
