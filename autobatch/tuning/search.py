"""The search over toggle sets, then sizes, that ends with the fastest candidate that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from autobatch.config import Config
from autobatch.errors import NothingFitsError, RunError
from autobatch.plan.settings import Plan
from autobatch.probing.runner import error_of, toggle_set_name
from autobatch.records import Candidate, Load, ModelSpec, Toggles, Trial, fits
from autobatch.storage import append_jsonl
from autobatch.tuning.bisect import largest_fitting
from autobatch.tuning.objective import (
    PlansBySize,
    first_fitting,
    is_plateau,
    judge_winner,
    note_of,
    nothing_fits_sentence,
    outcome_of,
    predicted_secs,
    smallest_close_to_best,
    smallest_failing,
)
from autobatch.tuning.result import SearchedSet, SearchResult
from autobatch.tuning.space import (
    candidate_at,
    fixed_size,
    left_out,
    load_tokens,
    toggle_sets,
)
from autobatch.units import format_secs

KERNEL_TOKENS = 8  # loads closer than this take the same kernels: not worth a trial
MIN_TIMEOUT_SECS = 30.0  # a trial is hanging after this, or ten times its predicted time
TIMEOUT_FACTOR = 10.0
FIRST_TIMEOUT_SECS = 900.0  # of a trial that nothing predicts: a large model is built in it
PLATEAU_SECS = 5.0  # a trial this cheap is made even where bigger is no longer faster


class Prober(Protocol):
    """What steps a candidate: `probing.runner.ProbeRunner`."""

    def run(self, candidate: Candidate, load: Load, *, timeout_secs: float) -> Trial:
        """Step the load and return what happened."""


def search(
    *,
    config: Config,
    spec: ModelSpec,
    prober: Prober,
    plan_of: Callable[[Candidate], Plan],
    num_ranks: int,
    fixed_keys: Collection[str],
    seconds: float | None,
    out_dir: Path,
    on_trial: Callable[[Trial, str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> SearchResult:
    """Return the candidate with the shortest expected run, of those whose worst load fits.

    Every toggle set gets an equal share of what is left of `seconds` (None: no limit). Each
    trial is appended to `out_dir/trials.jsonl` as it lands. Row counts are searched exactly;
    token budgets up to worst micro-batches that differ by less than 8 tokens (on a GPU: 1 %);
    budgets with the same worst micro-batch share a trial. A winner at the edge of memory is stepped twice.

    Raises:
        NothingFitsError: if no toggle set fits at its smallest size.
        RunError: if a trial fails other than by memory or time, or time ends before one fits.
        ConfigError: if the fixed keys contradict one another or the engine refuses a setting.
        PlanError: if a fixed size has no plan.
    """
    began = clock()
    deadline = began + (math.inf if seconds is None else seconds)
    (out_dir / "trials.jsonl").unlink(missing_ok=True)
    state = _Search(
        prober=prober,
        plans=PlansBySize(plan_of),
        out_dir=out_dir,
        on_trial=on_trial,
        deadline=deadline,
        clock=clock,
        fixed=fixed_size(config, fixed_keys),
        device=config.trainer.device,
    )
    sets = toggle_sets(config, num_ranks=num_ranks, fixed_keys=fixed_keys)
    searched = [state.search_set(toggles, len(sets) - n) for n, toggles in enumerate(sets)]
    searched = state.use_time_left(searched)
    if not any(s.largest for s in searched):
        if all(s.stopped_by == "oom" for s in searched):
            smallest = [s.smallest for s in searched]
            raise NothingFitsError(nothing_fits_sentence(config, spec, state.trials, smallest))
        raise RunError(
            f"the time ({format_secs(clock() - began)}) ended before a candidate fitted, "
            f"{len(state.trials)} tried; give more with --seconds"
        )
    winner, best = state.confirmed_winner(searched)
    speed = state.tokens_per_sec[winner.trial_id]
    binding, reason = judge_winner(
        winner, trials=state.own(best.toggles), speed=speed, stopped_by=best.stopped_by
    )
    others = [state.best(s.toggles) for s in searched if s is not best]
    fallbacks = sorted(
        (trial for trial in others if trial is not None),
        key=lambda trial: -state.tokens_per_sec[trial.trial_id],
    )
    return SearchResult(
        winner=winner,
        tokens_per_sec=dict(state.tokens_per_sec),
        trials=tuple(state.trials),
        searched=tuple(searched),
        fallbacks=tuple(fallbacks),
        stopped_by=best.stopped_by,
        binding=binding,
        reason=reason,
        left_out=left_out(config, fixed_keys=fixed_keys),
        seconds=clock() - began,
    )


@dataclass(kw_only=True)
class _Search:
    """The trials so far, with the plans behind them."""

    prober: Prober
    plans: PlansBySize
    out_dir: Path
    on_trial: Callable[[Trial, str], None] | None
    deadline: float
    clock: Callable[[], float]
    fixed: int | None
    device: str
    trials: list[Trial] = field(default_factory=list)
    tokens_per_sec: dict[str, float] = field(default_factory=dict)
    rejected: set[Candidate] = field(default_factory=set)
    starts: dict[bool, int] = field(default_factory=dict)  # use_remove_padding -> last largest

    def search_set(self, toggles: Toggles, num_left: int) -> SearchedSet:
        """Find the largest size of a toggle set that fits, then its best."""
        form = toggles.use_remove_padding
        lower, upper = self.plans.size_bounds(toggles)
        if self.fixed is not None:
            lower = upper = self.fixed
        share_ends = self.clock() + max(0.0, self.deadline - self.clock()) / num_left
        outcomes = {t.load: outcome_of(t) for t in self.own(toggles)}  # if it is gone on with
        device = self.device

        def try_size(size: int) -> str:
            candidate = candidate_at(toggles, size)
            load = self.plans.load(candidate)
            if load not in outcomes:
                refusal = self._refusal(candidate, load, share_ends)
                if refusal is not None:
                    return refusal
                trial = self._run(candidate, load)
                outcomes[load] = outcome_of(trial)
            return outcomes[load]

        def is_close(fitted: int, failed: int) -> bool:
            low, high = (
                load_tokens(self.plans.load(candidate_at(toggles, size)))
                for size in (fitted, failed)
            )
            # on a GPU the allocator's noise between two runs is about a hundredth
            least = KERNEL_TOKENS if device == "cpu" else max(KERNEL_TOKENS, low // 100)
            return form and abs(high - low) < least

        start = self.starts.get(form, lower)
        load = self.plans.load(candidate_at(toggles, min(max(start, lower), upper)))
        if (predicted_secs(self.trials, load) or 0.0) > (share_ends - self.clock()) / 4:
            start = lower  # a first trial has to leave time for others
        start = max((t.candidate.size for t in self.fitting(toggles)), default=start)
        found = largest_fitting(try_size, lower=lower, upper=upper, start=start, is_close=is_close)
        if found.largest is not None:
            self.starts[form] = found.largest
        speeds = self._speeds(toggles)
        self.tokens_per_sec.update(
            {t.trial_id: speeds[t.candidate.size] for t in self.fitting(toggles)}
        )
        best = self.best(toggles)
        return SearchedSet(
            name=toggle_set_name(toggles),
            toggles=toggles,
            stopped_by=found.stopped_by,
            smallest=candidate_at(toggles, lower),
            largest=found.largest,
            best_trial_id=best.trial_id if best else None,
            tokens_per_sec=self.tokens_per_sec[best.trial_id] if best else None,
        )

    def use_time_left(self, searched: list[SearchedSet]) -> list[SearchedSet]:
        """Go on with the toggle sets whose share of the time ended, the fastest first."""
        cut = [s for s in searched if s.stopped_by == "time"]
        for old in sorted(cut, key=lambda s: -(s.tokens_per_sec or 0.0)):
            new = self.search_set(old.toggles, 1)
            searched = [new if s is old else s for s in searched]
        return searched

    def confirmed_winner(self, searched: list[SearchedSet]) -> tuple[Trial, SearchedSet]:
        """Return the best trial; where memory ended the search it has to fit a second time."""
        while True:
            best = max(searched, key=lambda s: max(self._speeds(s.toggles).values(), default=0.0))
            trial = self.best(best.toggles)
            if trial is None:
                raise RunError(
                    "every candidate that fitted once ran out of memory when stepped again; "
                    "free memory that others use, or give a lower --memory-limit"
                )
            if best.stopped_by != "oom" or self.clock() + trial.seconds > self.deadline:
                return trial, best
            again = self._run(trial.candidate, trial.load)
            if fits(again):
                self.tokens_per_sec[again.trial_id] = self.tokens_per_sec[trial.trial_id]
                return trial, best
            self.rejected.add(trial.candidate)

    def fitting(self, toggles: Toggles) -> list[Trial]:
        """Return the trials of a toggle set that fitted, the first of each size."""
        return first_fitting(t for t in self.own(toggles) if t.candidate not in self.rejected)

    def own(self, toggles: Toggles) -> list[Trial]:
        """Return the trials of a toggle set, in order."""
        return [trial for trial in self.trials if trial.candidate.toggles == toggles]

    def best(self, toggles: Toggles) -> Trial | None:
        """Return the trial of the smallest size as fast as the fastest, None if none fitted."""
        fitting, speeds = self.fitting(toggles), self._speeds(toggles)
        if not fitting:
            return None
        size = smallest_close_to_best(speeds)
        return next(trial for trial in fitting if trial.candidate.size == size)

    def _speeds(self, toggles: Toggles) -> dict[int, float]:
        return self.plans.speeds(self.fitting(toggles))

    def _run(self, candidate: Candidate, load: Load) -> Trial:
        predicted = predicted_secs(self.own(candidate.toggles), load)
        timeout_secs = FIRST_TIMEOUT_SECS
        if predicted is not None:
            timeout_secs = max(MIN_TIMEOUT_SECS, TIMEOUT_FACTOR * predicted)
        timeout_secs = min(timeout_secs, max(self.deadline - self.clock(), 0.0))
        trial = self.prober.run(candidate, load, timeout_secs=timeout_secs)
        self.trials.append(trial)
        append_jsonl(self.out_dir / "trials.jsonl", trial)
        if self.on_trial is not None:
            self.on_trial(trial, note_of(trial))
        if trial.outcome == "error":
            raise error_of(trial, out_dir=self.out_dir / "probes")
        return trial

    def _refusal(self, candidate: Candidate, load: Load, share_ends: float) -> str | None:
        """Return why a trial is not worth starting: `time`, `plateau`, or None."""
        own, now = self.own(candidate.toggles), self.clock()
        predicted = predicted_secs(own, load)
        secs = predicted or 0.0
        if self.trials and self._has_to_start(candidate.toggles):
            secs += max(t.seconds - sum(t.step_secs) for t in self.trials)
        ends = share_ends if own else self.deadline
        if now >= self.deadline or (now + secs > ends and any(map(fits, self.trials))):
            return "time"
        if predicted is None or predicted < PLATEAU_SECS or smallest_failing(own) is not None:
            return None
        return "plateau" if is_plateau(self._speeds(candidate.toggles)) else None

    def _has_to_start(self, toggles: Toggles) -> bool:
        last = self.trials[-1]
        ends_by_oom = last.data_parallel_size > 1 or self.device == "cuda"
        died = last.outcome == "timeout" or (last.outcome == "oom" and ends_by_oom)
        return died or last.candidate.toggles != toggles
