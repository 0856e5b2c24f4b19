"""The trials of a search, set by set: which size is stepped next, and what they show so far."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from autobatch.errors import ConfigError
from autobatch.probing.runner import error_of, toggle_set_name
from autobatch.records import Candidate, Load, Toggles, Trial, fits
from autobatch.storage import append_jsonl
from autobatch.tuning.bisect import largest_fitting
from autobatch.tuning.objective import first_fitting, note_of, outcome_of, smallest_failing
from autobatch.tuning.result import SearchedSet
from autobatch.tuning.schedule import (
    Turn,
    first_size,
    first_timeout_secs,
    start_secs,
    starts_child,
    timeout_secs,
)
from autobatch.tuning.space import candidate_at, load_tokens
from autobatch.tuning.speed import (
    PlansBySize,
    is_plateau,
    predicted_secs,
    smallest_close_to_best,
)

KERNEL_TOKENS = 8  # loads closer than this take the same kernels: not worth a trial
PLATEAU_SECS = 5.0  # a trial this cheap is made even where bigger is no longer faster
FIRST_TRIALS = 3  # beyond its share, a set may halve so often until a size fits


class Prober(Protocol):
    """What steps a candidate: `probing.runner.ProbeRunner`."""

    def run(self, candidate: Candidate, load: Load, *, timeout_secs: float) -> Trial:
        """Step the load and return what happened."""


class RefusedError(ConfigError):
    """The engine refuses a setting of one toggle set."""


@dataclass(kw_only=True)
class Stepping:
    """The trials so far, with the plans behind them."""

    prober: Prober
    plans: PlansBySize
    out_dir: Path
    on_trial: Callable[[Trial, str], None] | None
    deadline: float
    clock: Callable[[], float]
    fixed: int | None
    device: str
    screening_secs: float  # of a toggle set, were all screened alike
    trials: list[Trial] = field(default_factory=list)
    tokens_per_sec: dict[str, float] = field(default_factory=dict)  # by trial_id
    rejected: dict[Toggles, int] = field(default_factory=dict)  # the smallest size

    def search_set(self, toggles: Toggles, turn: Turn) -> SearchedSet:
        """Find the largest size of a toggle set that fits, going on from its trials.

        Raises:
            RefusedError: if the engine refuses a setting of it.
            AutobatchError: if a trial fails other than by memory or time.
        """
        lower, upper = self._bounds(toggles)
        outcomes = {trial.load: outcome_of(trial) for trial in self._own(toggles)}

        def try_size(size: int) -> str:
            candidate = candidate_at(toggles, size)
            load = self.plans.load(candidate)
            if load not in outcomes:
                refusal = self._refusal(candidate, load, turn)
                if refusal is not None:
                    return refusal
                outcomes[load] = outcome_of(self._run(candidate, load, turn.share_secs))
            return outcomes[load]

        def is_close(fitted: int, failed: int) -> bool:
            low, high = (
                load_tokens(self.plans.load(candidate_at(toggles, size)))
                for size in (fitted, failed)
            )
            # on a GPU the allocator's noise between two runs is about a hundredth
            least = KERNEL_TOKENS if self.device == "cpu" else max(KERNEL_TOKENS, low // 100)
            return toggles.use_remove_padding and abs(high - low) < least

        found = largest_fitting(
            try_size,
            lower=lower,
            upper=upper,
            start=self._start(toggles, turn),
            is_close=is_close,
        )
        return self._summary(toggles, stopped_by=found.stopped_by, largest=found.largest)

    def step_again(self, trial: Trial) -> bool | None:
        """Return whether a candidate fits a second time; None if there is no time to see.

        One that does not is rejected, with every larger size of its toggle set.
        """
        toggles = trial.candidate.toggles
        if self.clock() + self._expected_secs(toggles, trial.load) > self.deadline:
            return None
        again = self._run(trial.candidate, trial.load, math.inf)
        if fits(again):
            self.tokens_per_sec[again.trial_id] = self.tokens_per_sec[trial.trial_id]
            return True
        self.rejected[toggles] = trial.candidate.size
        return False

    def without_rejected(self, searched: SearchedSet) -> SearchedSet:
        """Return the record of a toggle set by the sizes of it that are not rejected."""
        largest = max((t.candidate.size for t in self.fitting(searched.toggles)), default=None)
        return self._summary(searched.toggles, stopped_by=searched.stopped_by, largest=largest)

    def evidence(self, toggles: Toggles) -> list[Trial]:
        """Return the trials of a toggle set but those that fitted once and were rejected."""
        return [t for t in self._own(toggles) if not (fits(t) and self._is_rejected(t))]

    def fitting(self, toggles: Toggles) -> list[Trial]:
        """Return the trials of a toggle set that fitted, the first of each size."""
        return first_fitting(self.evidence(toggles))

    def hung(self, toggles: Toggles) -> bool:
        """Return whether a trial of a toggle set timed out and none fitted."""
        own = self._own(toggles)
        return any(t.outcome == "timeout" for t in own) and not any(map(fits, own))

    def best(self, toggles: Toggles) -> Trial | None:
        """Return the trial of the smallest size as fast as the fastest, None if none fitted."""
        fitting = self.fitting(toggles)
        if not fitting:
            return None
        size = smallest_close_to_best(self.plans.speeds(fitting))
        return next(trial for trial in fitting if trial.candidate.size == size)

    def _own(self, toggles: Toggles) -> list[Trial]:
        return [trial for trial in self.trials if trial.candidate.toggles == toggles]

    def _is_rejected(self, trial: Trial) -> bool:
        return trial.candidate.size >= self.rejected.get(trial.candidate.toggles, math.inf)

    def _bounds(self, toggles: Toggles) -> tuple[int, int]:
        bounds = self.plans.size_bounds(toggles)
        return bounds if self.fixed is None else (self.fixed, self.fixed)

    def _summary(self, toggles: Toggles, *, stopped_by: str, largest: int | None) -> SearchedSet:
        for trial in self._own(toggles):
            self.tokens_per_sec.pop(trial.trial_id, None)
        fitting = self.fitting(toggles)
        speeds = self.plans.speeds(fitting)
        self.tokens_per_sec.update({t.trial_id: speeds[t.candidate.size] for t in fitting})
        best = self.best(toggles)
        return SearchedSet(
            name=toggle_set_name(toggles),
            toggles=toggles,
            stopped_by=stopped_by,
            smallest=candidate_at(toggles, self._bounds(toggles)[0]),
            largest=largest,
            best_trial_id=best.trial_id if best else None,
            tokens_per_sec=self.tokens_per_sec[best.trial_id] if best else None,
        )

    def _start(self, toggles: Toggles, turn: Turn) -> int:
        """Return the size to step first: its own largest, or what sets of its form found useful.

        On a GPU all sets of a form start alike, so that their speeds can be compared.
        """
        lower, upper = self._bounds(toggles)
        own = self.fitting(toggles)
        if own:
            return max(trial.candidate.size for trial in own)
        form = toggles.use_remove_padding
        known = self._largest_of_fastest(form) if self.device == "cpu" else self._first_of(form)
        size = known or first_size(lower=lower, upper=upper, device=self.device)
        failed = [t.candidate.size // 2 for t in self._own(toggles) if not fits(t)]
        size = max(lower, min(size, upper, *failed))
        # a first trial has to leave time for others; a short one beside its start always does
        usual_start_secs = start_secs(self.trials, device=self.device)
        if self.device == "cpu":
            most = max((turn.ends - self.clock()) / 4, usual_start_secs / 2)
        else:
            most = max(self.screening_secs, usual_start_secs)
        while size > lower:
            load = self.plans.load(candidate_at(toggles, size))
            if (predicted_secs(self.trials, load) or 0.0) <= most:
                break
            size = max(lower, size // 2)
        return size

    def _first_of(self, use_remove_padding: bool) -> int | None:
        """Return the first size that fitted in any toggle set of a form."""
        sizes = (
            trial.candidate.size
            for trial in self.trials
            if trial.candidate.toggles.use_remove_padding == use_remove_padding and fits(trial)
        )
        return next(sizes, None)

    def _largest_of_fastest(self, use_remove_padding: bool) -> int | None:
        """Return the largest size that fitted in the fastest toggle set of a form."""
        known = [
            (speed, trial.candidate.toggles)
            for trial in self.trials
            if trial.candidate.toggles.use_remove_padding == use_remove_padding
            and (speed := self.tokens_per_sec.get(trial.trial_id)) is not None
        ]
        if not known:
            return None
        fastest = max(known, key=lambda pair: pair[0])[1]
        return max((trial.candidate.size for trial in self.fitting(fastest)), default=None)

    def _expected_secs(self, toggles: Toggles, load: Load) -> float:
        """Return the seconds of a trial, by the set's own trials if there are any; unknown: 0."""
        secs = predicted_secs(self._own(toggles), load) or predicted_secs(self.trials, load) or 0.0
        last = self.trials[-1] if self.trials else None
        if starts_child(last, toggles, device=self.device):
            secs += start_secs(self.trials, device=self.device)
        return secs

    def _run(self, candidate: Candidate, load: Load, share_secs: float) -> Trial:
        expected = self._expected_secs(candidate.toggles, load)
        if predicted_secs(self._own(candidate.toggles), load) is not None:
            timeout = timeout_secs(expected=expected)
        else:
            is_known = any(map(fits, self.trials))
            timeout = first_timeout_secs(
                share_secs=share_secs, expected=expected if is_known else None
            )
        timeout = min(timeout, max(self.deadline - self.clock(), 0.0))
        trial = self.prober.run(candidate, load, timeout_secs=timeout)
        self.trials.append(trial)
        append_jsonl(self.out_dir / "trials.jsonl", trial)
        if self.on_trial is not None:
            self.on_trial(trial, note_of(trial))
        if trial.outcome == "error":
            error = error_of(trial, out_dir=self.out_dir / "probes")
            if (trial.message or "").startswith("ConfigError: "):
                raise RefusedError(str(error))
            raise error
        return trial

    def _refusal(self, candidate: Candidate, load: Load, turn: Turn) -> str | None:
        """Return why a trial is not worth starting: `time`, `plateau`, or None."""
        own, now = self._own(candidate.toggles), self.clock()
        is_first = len(own) < FIRST_TRIALS and all(outcome_of(t) == "oom" for t in own)
        ends = turn.first_ends if is_first else turn.ends
        is_late = now + self._expected_secs(candidate.toggles, load) > ends
        if now >= self.deadline or (is_late and any(map(fits, self.trials))):
            return "time"
        predicted = predicted_secs(own, load)
        if predicted is None or predicted < PLATEAU_SECS or smallest_failing(own) is not None:
            return None
        return "plateau" if is_plateau(self.plans.speeds(self.fitting(candidate.toggles))) else None
