"""The largest size that fits, by doubling to a bracket that is then halved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """One size tried, and what was known after it: `fits` fits, `fails` does not."""

    size: int
    outcome: str
    fits: int | None
    fails: int | None


@dataclass(frozen=True, kw_only=True)
class Bisection:
    """The largest size that fitted (None: not even the smallest) and how it was found."""

    largest: int | None
    stopped_by: str  # oom | cap | plateau | time
    log: tuple[Bracket, ...]


def largest_fitting(
    try_size: Callable[[int], str],
    *,
    lower: int,
    upper: int,
    start: int | None = None,
    is_close: Callable[[int, int], bool] | None = None,
) -> Bisection:
    """Return the largest size in [lower, upper] for which `try_size` says `fits`.

    Doubles from `start` (None: lower) while sizes fit, or halves until one does, then bisects:
    at most about 2·log2 trials, each size tried once, and what is returned was tried. Exact,
    unless `is_close(fits, other)` says that a size that fails, or `upper`, is no step
    worth taking. `try_size` returns

    - `fits`, or `oom` or `timeout` for a size that does not;
    - `plateau` or `time` for a size that it did not try because the search should end.
    """
    assert 1 <= lower <= upper
    log: list[Bracket] = []
    fits: int | None = None
    fails: int | None = None
    failed_by = "cap"
    size = min(max(start or lower, lower), upper)
    while True:
        outcome = try_size(size)
        if outcome == "fits":
            fits = size
        elif outcome in ("oom", "timeout"):
            fails, failed_by = size, "oom" if outcome == "oom" else "time"
        log.append(Bracket(size=size, outcome=outcome, fits=fits, fails=fails))
        if outcome in ("plateau", "time"):
            return Bisection(largest=fits, stopped_by=outcome, log=tuple(log))
        if fits is None:
            assert fails is not None
            if fails == lower:
                return Bisection(largest=None, stopped_by=failed_by, log=tuple(log))
            size = max(lower, fails // 2)
        elif fails is None:
            if fits == upper or (is_close is not None and is_close(fits, upper)):
                return Bisection(largest=fits, stopped_by="cap", log=tuple(log))
            size = min(upper, fits * 2)
        else:
            if fails - fits <= 1 or (is_close is not None and is_close(fits, fails)):
                return Bisection(largest=fits, stopped_by=failed_by, log=tuple(log))
            size = (fits + fails) // 2
