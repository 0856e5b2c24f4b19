"""What trials promise for the whole run: speeds, limits, in numbers or one sentence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import fmean, median

from autobatch.config import Config
from autobatch.model import num_parameters
from autobatch.plan.epochs import iter_steps
from autobatch.plan.settings import Plan, num_steps
from autobatch.plan.worst import real_tokens_per_run, size_bounds
from autobatch.probing.runner import toggle_set_name
from autobatch.records import Candidate, Load, ModelSpec, Toggles, Trial, fits
from autobatch.tuning.space import candidate_at, load_of, load_tokens, size_text
from autobatch.units import format_count, format_gib

MAX_SAMPLED_STEPS = 200
CLOSE_FRACTION = 0.02  # of the best: sizes this close are as fast, and the smallest is taken


def micro_batch_secs(trials: Iterable[Trial]) -> Callable[[int], float]:
    """Return seconds of forward and backward as a function of a micro-batch's computed tokens.

    Piecewise linear through the trials that fitted, all of one toggle set; beyond them along the
    nearest piece, never negative. A single trial: proportional.
    """
    by_tokens: dict[int, list[float]] = defaultdict(list)
    for trial in trials:
        if fits(trial):
            by_tokens[load_tokens(trial.load)].append(fmean(trial.micro_batch_secs))
    points = sorted((tokens, fmean(secs)) for tokens, secs in by_tokens.items())
    assert points
    if len(points) == 1:
        points.insert(0, (0, 0.0))
    pieces = list(pairwise(points))

    def secs_of(num_tokens: int) -> float:
        (low, low_secs), (high, high_secs) = next(
            (piece for piece in pieces if num_tokens <= piece[1][0]), pieces[-1]
        )
        slope = (high_secs - low_secs) / (high - low)
        return max(0.0, low_secs + slope * (num_tokens - low))

    return secs_of


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


def estimate_run_secs(sample: PlanSample, trials: Sequence[Trial]) -> float:
    """Return the seconds of all optimizer steps of a plan, from trials of its toggle set.

    The n-th micro-batches of all ranks wait for the slowest; the optimizer's seconds come once a
    step. What the sample leaves out is taken to be like it.
    """
    secs_of = micro_batch_secs(trials)
    optimizer_secs = median(
        trial.optimizer_secs for trial in trials if fits(trial) and trial.optimizer_secs is not None
    )
    total = sum(max(map(secs_of, ranks)) for step in sample.steps for ranks in step)
    total += optimizer_secs * len(sample.steps)
    return total * sample.num_steps / len(sample.steps)


def estimate_tokens_per_sec(sample: PlanSample, trials: Sequence[Trial]) -> float:
    """Return the real tokens of all ranks per second of the run."""
    return sample.num_real_tokens / max(estimate_run_secs(sample, trials), 1e-9)


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
            t.candidate.size: estimate_tokens_per_sec(self._sample(t.candidate), fitting)
            for t in fitting
        }

    def _sample(self, candidate: Candidate) -> PlanSample:
        key = (candidate.toggles.use_remove_padding, candidate.size)
        if key not in self._samples:
            self._samples[key] = sample_plan(self._plan_of(candidate))
        return self._samples[key]


def outcome_of(trial: Trial) -> str:
    """Return `fits`, or why not; a trial that ended above its limit counts as out of memory."""
    if trial.outcome == "ok":
        return "fits" if fits(trial) else "oom"
    return trial.outcome


def note_of(trial: Trial) -> str:
    """Return what a trial showed, in a few words."""
    words = {"fits": "fits", "oom": "out of memory", "timeout": "timed out", "error": "failed"}
    return (
        f"{toggle_set_name(trial.candidate.toggles)}, {size_text(trial.candidate)}: "
        f"{words[outcome_of(trial)]} ({format_gib(trial.peak_reserved_bytes)})"
    )


def first_fitting(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials that fitted, the first of each size."""
    by_size: dict[int, Trial] = {}
    for trial in trials:
        if fits(trial):
            by_size.setdefault(trial.candidate.size, trial)
    return list(by_size.values())


def smallest_failing(trials: Iterable[Trial]) -> Candidate | None:
    """Return the smallest candidate that ran out of memory, of one toggle set's trials."""
    failing = [trial.candidate for trial in trials if outcome_of(trial) == "oom"]
    return min(failing, key=lambda candidate: candidate.size, default=None)


def predicted_secs(trials: Iterable[Trial], load: Load) -> float | None:
    """Return the seconds of a load's steps by computed tokens, from the nearest trial.

    None if no trial, all of one toggle set, made both of its steps.
    """
    tokens = load_tokens(load)
    known = [trial for trial in trials if len(trial.step_secs) > 1]
    if not known:
        return None
    nearest = min(known, key=lambda trial: abs(load_tokens(trial.load) - tokens))
    return sum(nearest.step_secs) * tokens / load_tokens(nearest.load)


def smallest_close_to_best(speeds: Mapping[int, float]) -> int:
    """Return the smallest size within 2 % of the fastest: {size: tokens per second}."""
    enough = max(speeds.values()) * (1 - CLOSE_FRACTION)
    return min(size for size, speed in speeds.items() if speed >= enough)


def is_plateau(speeds: Mapping[int, float]) -> bool:
    """Return whether the two largest sizes made the run less than 2 % faster: {size: speed}."""
    return len(speeds) > 2 and smallest_close_to_best(speeds) <= sorted(speeds)[-3]


def binding_of(*, size: int, largest: int, stopped_by: str) -> str:
    """Return what limits the winner: memory, global_batch, or host (bigger is not faster).

    A size that fitted and is less than half as large again shows no plateau: as many
    micro-batches may make the step.
    """
    if largest >= 1.5 * size:
        return "host"
    return {"oom": "memory", "cap": "global_batch"}.get(stopped_by, "host")


def judge_winner(
    winner: Trial, *, trials: Sequence[Trial], speed: float, stopped_by: str
) -> tuple[str, str]:
    """Return what binds the winner, and one sentence with numbers that says why it won.

    `trials`: of its toggle set; `speed`: its real tokens per second.
    """
    failing = smallest_failing(trials)
    largest = max(trial.candidate.size for trial in trials if fits(trial))
    binding = binding_of(
        size=winner.candidate.size, largest=largest, stopped_by="oom" if failing else stopped_by
    )
    why = "larger ones are less than 2 % faster"
    if binding == "memory" and failing is not None:
        why = f"{size_text(failing)} ran out of memory"
    elif binding == "global_batch":
        why = "train_batch_size gives a rank no larger micro-batch"
    elif stopped_by == "time" and winner.candidate.size == largest:
        why = "the time ended before a larger one was tried"
    return binding, (
        f"{size_text(winner.candidate)} a micro-batch give an estimated {format_count(speed)} "
        f"real tokens/s at {format_gib(winner.peak_reserved_bytes)} of "
        f"{format_gib(winner.memory_limit_bytes)}; {why}"
    )


def nothing_fits_sentence(
    config: Config, spec: ModelSpec, trials: Sequence[Trial], smallest: Sequence[Candidate]
) -> str:
    """Return what was tried when nothing fitted, what takes the memory, and what to do."""
    peaks = [t.peak_reserved_bytes for t in trials if t.peak_reserved_bytes is not None]
    sizes = " and ".join(dict.fromkeys(map(size_text, smallest)))
    reached = f" (it passed {format_gib(min(peaks))})" if peaks else ""
    state = ""
    parameters = num_parameters(spec)
    if parameters is not None:
        per_parameter = state_bytes_per_parameter(config)
        shards = trials[0].data_parallel_size if smallest[0].toggles.strategy == "fsdp2" else 1
        state = (
            f"; weights, gradients and optimizer alone take "
            f"{format_gib(parameters * per_parameter / shards)} a rank "
            f"({format_count(parameters)} parameters x {per_parameter} bytes / {shards})"
        )
    remedies = ["a shorter --max-length", "LoRA", "more GPUs", "a bigger --memory-limit"]
    if all(candidate.toggles.gradient_checkpointing == "none" for candidate in smallest):
        remedies.insert(0, "model.gradient_checkpointing=full")
    return (
        f"nothing fits in {format_gib(trials[0].memory_limit_bytes)}: even {sizes} a micro-batch "
        f"ran out of memory{reached}{state}; try {', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def state_bytes_per_parameter(config: Config) -> int:
    """Return the bytes of master weight, gradient and two Adam moments of one parameter.

    16 in fp32 (4 + 4 + 8). Source: ZeRO, arXiv:1910.02054, section 3.
    """
    return 4 * (2 if config.engine.state_dtype == "bf16" else 4)
