"""How long the whole run takes at a candidate, from trials of its toggle set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, median

from autobatch.plan.epochs import iter_steps
from autobatch.plan.settings import Plan, num_steps
from autobatch.plan.worst import real_tokens_per_run, size_bounds
from autobatch.records import Candidate, Load, Toggles, Trial, fits
from autobatch.tuning.space import candidate_at, load_of, load_tokens

MAX_SAMPLED_STEPS = 200
CLOSE_FRACTION = 0.02  # of the best: sizes this close are as fast, and the smallest is taken
LEAST_SPREAD = 1.25  # largest by smallest tokens: closer trials tell a slope no better than noise


def micro_batch_secs(trials: Iterable[Trial], *, own: Trial) -> Callable[[int], float]:
    """Return seconds of forward and backward as a function of a micro-batch's computed tokens.

    One affine law, intercept and slope never negative, is fitted by least squares to the trials
    that fitted, all of one toggle set, then scaled to pass through the trial `own`. Trials that
    differ by less than a quarter in tokens, or a single one: proportional.
    """
    points = [(load_tokens(trial.load), _worst_secs(trial)) for trial in trials if fits(trial)]
    intercept, slope = _affine_law(points)
    own_tokens = load_tokens(own.load)
    scale = _worst_secs(own) / max(intercept + slope * own_tokens, 1e-12)
    return lambda num_tokens: scale * (intercept + slope * num_tokens)


def _worst_secs(trial: Trial) -> float:
    """Return the seconds of one worst micro-batch; a load's first two are it.

    The shorter one counts: what else the host does only ever makes one longer, once to twice its
    time (0.59 s and 0.26 s for the same micro-batch on an H200, 2026-12-01), which lost a search.
    """
    return min(trial.micro_batch_secs[:2])


def _affine_law(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return intercept and slope >= 0 of the least squares through (tokens, secs)."""
    tokens, secs = [t for t, _ in points], [s for _, s in points]
    proportional = (0.0, sum(t * s for t, s in points) / sum(t * t for t in tokens))
    if max(tokens) < LEAST_SPREAD * min(tokens):
        return proportional
    mean_tokens, mean_secs = fmean(tokens), fmean(secs)
    slope = sum((t - mean_tokens) * (s - mean_secs) for t, s in points)
    slope /= sum((t - mean_tokens) ** 2 for t in tokens)
    intercept = mean_secs - slope * mean_tokens
    if slope < 0:
        return mean_secs, 0.0
    return (intercept, slope) if intercept >= 0 else proportional


@dataclass(frozen=True, kw_only=True)
class PlanSample:
    """The computed tokens of a plan's steps: of each micro-batch index, one number a rank."""

    steps: tuple[tuple[tuple[int, ...], ...], ...]  # [step][micro-batch][rank]
    num_steps: int  # of the whole plan
    num_real_tokens: int  # of the whole plan: no padding, no fillers


def sample_plan(plan: Plan) -> PlanSample:
    """Return the first 200 steps of a plan; its seeded order is random already.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    return PlanSample(
        steps=tuple(
            tuple(
                tuple(batch.num_tokens for batch in micro_batches)
                for micro_batches in zip(*step.ranks, strict=True)
            )
            for step in islice(iter_steps(plan), MAX_SAMPLED_STEPS)
        ),
        num_steps=num_steps(plan),
        num_real_tokens=real_tokens_per_run(plan),
    )


def estimate_run_secs(sample: PlanSample, trials: Sequence[Trial], *, own: Trial) -> float:
    """Return the seconds of all optimizer steps of a plan, from trials of its toggle set.

    `own`: the trial of the plan's candidate. The n-th micro-batches of all ranks wait for the
    slowest; the optimizer's seconds come once a step. What the sample leaves out is taken to be
    like it.
    """
    secs_of = micro_batch_secs(trials, own=own)
    optimizer_secs = median(
        trial.optimizer_secs for trial in trials if fits(trial) and trial.optimizer_secs is not None
    )
    total = sum(max(map(secs_of, ranks)) for step in sample.steps for ranks in step)
    total += optimizer_secs * len(sample.steps)
    return total * sample.num_steps / len(sample.steps)


def estimate_tokens_per_sec(sample: PlanSample, trials: Sequence[Trial], *, own: Trial) -> float:
    """Return the real tokens of all ranks per second of the run."""
    return sample.num_real_tokens / max(estimate_run_secs(sample, trials, own=own), 1e-9)


class PlansBySize:
    """What the search asks of plans, each worked out once; toggles but the form do not matter."""

    def __init__(self, plan_of: Callable[[Candidate], Plan]) -> None:
        self._plan_of = plan_of
        self._bounds: dict[bool, tuple[int, int]] = {}
        self._loads: dict[tuple[bool, int], Load] = {}
        self._samples: dict[tuple[bool, int], PlanSample] = {}

    def size_bounds(self, toggles: Toggles) -> tuple[int, int]:
        """Return the smallest and the largest useful size of a toggle set."""
        form = toggles.use_remove_padding
        if form not in self._bounds:
            self._bounds[form] = size_bounds(self._plan_of(candidate_at(toggles, 1)))
        return self._bounds[form]

    def load(self, candidate: Candidate) -> Load:
        """Return the load of the worst micro-batch of a candidate's plan."""
        key = (candidate.toggles.use_remove_padding, candidate.size)
        if key not in self._loads:
            self._loads[key] = load_of(self._plan_of(candidate))
        return self._loads[key]

    def speeds(self, fitting: Sequence[Trial]) -> dict[int, float]:
        """Return {size: real tokens per second} of fitting trials of one toggle set."""
        return {
            t.candidate.size: estimate_tokens_per_sec(self._sample(t.candidate), fitting, own=t)
            for t in fitting
        }

    def _sample(self, candidate: Candidate) -> PlanSample:
        key = (candidate.toggles.use_remove_padding, candidate.size)
        if key not in self._samples:
            self._samples[key] = sample_plan(self._plan_of(candidate))
        return self._samples[key]


def predicted_secs(trials: Iterable[Trial], load: Load) -> float | None:
    """Return the seconds of a load's steps by computed tokens, from the nearest trial.

    None if no trial made both of its steps.
    """
    tokens = _step_tokens(load)
    known = [trial for trial in trials if len(trial.step_secs) > 1]
    if not known:
        return None
    nearest = min(known, key=lambda trial: abs(_step_tokens(trial.load) - tokens))
    return steps_secs(nearest) * tokens / _step_tokens(nearest.load)


def steps_secs(trial: Trial) -> float:
    """Return the seconds of a trial's steps, had all been like the last.

    The first makes kernels (on a GPU for ten seconds and more), which belongs to the start.
    """
    return len(trial.step_secs) * trial.step_secs[-1] if trial.step_secs else 0.0


def _step_tokens(load: Load) -> int:
    """Return the computed tokens of all micro-batches of a load."""
    if load.padded_to is None:
        return sum(map(sum, load.micro_batches))
    return load.padded_to * sum(map(len, load.micro_batches))


def smallest_close_to_best(speeds: Mapping[int, float]) -> int:
    """Return the smallest size within 2 % of the fastest: {size: tokens per second}."""
    enough = max(speeds.values()) * (1 - CLOSE_FRACTION)
    return min(size for size, speed in speeds.items() if speed >= enough)


def is_plateau(speeds: Mapping[int, float]) -> bool:
    """Return whether the two largest sizes made the run less than 2 % faster: {size: speed}."""
    return len(speeds) > 2 and smallest_close_to_best(speeds) <= sorted(speeds)[-3]
