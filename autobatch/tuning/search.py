"""The search over toggle sets, then sizes, that ends with the fastest candidate that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from autobatch.config import Config
from autobatch.errors import ConfigError, NothingFitsError, RunError
from autobatch.plan.settings import Plan
from autobatch.probing.runner import toggle_set_name
from autobatch.records import Candidate, ModelSpec, Toggles, Trial
from autobatch.tuning.objective import judge_winner, nothing_fits_sentence
from autobatch.tuning.result import SearchedSet, SearchResult
from autobatch.tuning.schedule import (
    SCREENING_FRACTION,
    agreed,
    most_different_first,
    turn,
    worth_going_on,
)
from autobatch.tuning.space import fixed_size, left_out, toggle_sets
from autobatch.tuning.speed import PlansBySize
from autobatch.tuning.stepping import Prober, RefusedError, Stepping
from autobatch.units import format_secs


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

    In about 60 % of `seconds` (None: no limit) every toggle set is screened; the rest goes to
    those that may still win, the fastest first. Each trial is appended to `out_dir/trials.jsonl`
    as it lands. Row counts are searched exactly; token budgets up to worst micro-batches that
    differ by less than 8 tokens (on a GPU: 1 %); budgets with the same worst micro-batch share a
    trial. A winner at the edge of memory is stepped twice. A toggle set that the engine refuses
    is left out.

    Raises:
        NothingFitsError: if no toggle set fits at its smallest size.
        RunError: if a trial fails other than by memory or time, or time ends before one fits.
        ConfigError: if the fixed keys contradict one another or the engine refuses
            every toggle set.
        PlanError: if a fixed size has no plan.
    """
    began = clock()
    deadline = began + (math.inf if seconds is None else seconds)
    (out_dir / "trials.jsonl").unlink(missing_ok=True)
    sets = toggle_sets(config, num_ranks=num_ranks, fixed_keys=fixed_keys)
    screening_secs = SCREENING_FRACTION * (deadline - began)
    state = Stepping(
        prober=prober,
        plans=PlansBySize(plan_of),
        out_dir=out_dir,
        on_trial=on_trial,
        deadline=deadline,
        clock=clock,
        fixed=fixed_size(config, fixed_keys),
        device=config.trainer.device,
        screening_secs=screening_secs / len(sets),
    )
    refused: dict[Toggles, str] = {}
    searched = _screen(state, sets, refused, until=began + screening_secs)
    searched = _go_on(state, searched, refused)
    if not searched:
        raise ConfigError(next(iter(refused.values())))
    if not any(s.largest for s in searched):
        if all(s.stopped_by == "oom" for s in searched):
            smallest = [s.smallest for s in searched]
            raise NothingFitsError(nothing_fits_sentence(config, spec, state.trials, smallest))
        raise RunError(
            f"the time ({format_secs(clock() - began)}) ended before a candidate fitted, "
            f"{len(state.trials)} tried; give more with --seconds"
        )
    winner, best, searched = _confirmed_winner(state, searched)
    speed = state.tokens_per_sec[winner.trial_id]
    binding, reason = judge_winner(
        winner, trials=state.evidence(best.toggles), speed=speed, stopped_by=best.stopped_by
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
        left_out={
            **left_out(config, fixed_keys=fixed_keys),
            **{toggle_set_name(toggles): sentence for toggles, sentence in refused.items()},
        },
        seconds=clock() - began,
    )


def _screen(
    state: Stepping, sets: Sequence[Toggles], refused: dict[Toggles, str], *, until: float
) -> list[SearchedSet]:
    """Return every toggle set after its share of the time until `until`; adds to `refused`.

    Raises:
        ConfigError: if the engine refuses a setting that all toggle sets share.
    """
    searched: list[SearchedSet] = []
    waiting = list(sets)
    while waiting:
        toggles = waiting.pop(0)
        share = turn(now=state.clock(), until=until, num_left=len(waiting) + 1)
        try:
            searched.append(state.search_set(toggles, share))
        except RefusedError as refusal:
            refused[toggles] = str(refusal)
            alike = [known for known, sentence in refused.items() if sentence == str(refusal)]
            if not searched and agreed(alike) <= agreed(sets):
                raise ConfigError(str(refusal)) from refusal
            if len(refused) == 1 and not searched:  # is it what they all share?
                waiting = most_different_first(waiting, toggles)
    return searched


def _go_on(
    state: Stepping, searched: list[SearchedSet], refused: dict[Toggles, str]
) -> list[SearchedSet]:
    """Search on in the sets that may still win, the fastest first, until they are exact."""
    leader = max((s.tokens_per_sec or 0.0 for s in searched), default=0.0)
    done: set[Toggles] = set()
    while state.clock() < state.deadline:
        waiting = [s for s in worth_going_on(searched, leader=leader) if s.toggles not in done]
        if not waiting:
            break
        old = min(waiting, key=lambda s: state.hung(s.toggles))  # the first, if none hung
        is_screened = old.tokens_per_sec is not None
        num_left = 1 if is_screened else len(waiting)
        share = turn(now=state.clock(), until=state.deadline, num_left=num_left)
        try:
            new = state.search_set(old.toggles, share)
        except RefusedError as refusal:
            refused[old.toggles] = str(refusal)
            searched = [s for s in searched if s is not old]
            continue
        searched = [new if s is old else s for s in searched]
        if is_screened or new.tokens_per_sec is None:
            done.add(old.toggles)
    return searched


def _confirmed_winner(
    state: Stepping, searched: list[SearchedSet]
) -> tuple[Trial, SearchedSet, list[SearchedSet]]:
    """Return the best trial, its set, all sets; at the edge of memory it has to fit twice."""
    while True:
        best = max(searched, key=lambda s: s.tokens_per_sec or 0.0)
        trial = state.best(best.toggles)
        if trial is None:
            raise RunError(
                "every candidate that fitted once ran out of memory when stepped again; "
                "free memory that others use, or give a lower --memory-limit"
            )
        if best.stopped_by != "oom" or state.step_again(trial) is not False:
            return trial, best, searched
        new = state.without_rejected(best)
        searched = [new if s is best else s for s in searched]
