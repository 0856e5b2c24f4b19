"""What trials of a toggle set say about the limit and the winner, in words of one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autobatch.config import Config
from autobatch.model import num_parameters
from autobatch.probing.runner import toggle_set_name
from autobatch.records import Candidate, ModelSpec, Trial, fits
from autobatch.tuning.space import size_text
from autobatch.units import format_count, format_gib


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
    failing = smallest_failing(t for t in trials if t.candidate.size > winner.candidate.size)
    largest = max(trial.candidate.size for trial in trials if fits(trial))
    binding = binding_of(
        size=winner.candidate.size, largest=largest, stopped_by="oom" if failing else stopped_by
    )
    why = "larger ones are less than 2 % faster"
    if binding == "memory" and failing is not None:
        why = f"{size_text(failing)} ran out of memory"
        if stopped_by == "time":
            why += ", the time ended before a size between was tried"
    elif binding == "global_batch":
        why = "train_batch_size gives a rank no larger micro-batch"
    elif any(t.outcome == "timeout" and t.candidate.size > largest for t in trials):
        why = "a larger one did not end in time"
    elif stopped_by == "time" and winner.candidate.size == largest:
        why = "the time ended before a larger one was tried"
    return binding, (
        f"{size_text(winner.candidate)} a micro-batch give an estimated {format_count(speed)} "
        f"real tokens/s at {format_gib(winner.peak_reserved_bytes)} of "
        f"{format_gib(winner.memory_limit_bytes)}; {why}"
    )


def state_too_large_sentence(
    config: Config, spec: ModelSpec, *, limit_bytes: int, num_shards: int
) -> str | None:
    """Return why no micro-batch can fit: the training state of one rank alone does not.

    None where it does, or is not known (adapters train a few parameters only).
    """
    parameters = num_parameters(spec)
    if parameters is None or config.model.lora_rank:
        return None
    if parameters * state_bytes_per_parameter(config) / num_shards < limit_bytes:
        return None
    remedies = _remedies_for_state(config, parameters / num_shards, limit_bytes)
    return (
        f"nothing fits in {format_gib(limit_bytes)}: {_state_words(config, parameters, num_shards)}"
        f"; try {', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _state_words(config: Config, parameters: int, num_shards: int) -> str:
    per_parameter = state_bytes_per_parameter(config)
    return (
        f"weights, gradients and optimizer alone take "
        f"{format_gib(parameters * per_parameter / num_shards)} a rank "
        f"({format_count(parameters)} parameters x {per_parameter} bytes / {num_shards})"
    )


def nothing_fits_sentence(
    config: Config, spec: ModelSpec, trials: Sequence[Trial], smallest: Sequence[Candidate]
) -> str:
    """Return what was tried when nothing fitted, what takes the memory, and what to do."""
    peaks = [t.peak_reserved_bytes for t in trials if t.peak_reserved_bytes is not None]
    sizes = " and ".join(dict.fromkeys(map(size_text, smallest)))
    reached = f" (it passed {format_gib(min(peaks))})" if peaks else ""
    limit = trials[0].memory_limit_bytes
    shards = trials[0].data_parallel_size if smallest[0].toggles.strategy == "fsdp2" else 1
    too_large = state_too_large_sentence(config, spec, limit_bytes=limit, num_shards=shards)
    if too_large is not None:
        return too_large
    state = ""
    remedies = ["a shorter --max-length", "LoRA", "more GPUs", "a bigger --memory-limit"]
    if all(candidate.toggles.gradient_checkpointing == "none" for candidate in smallest):
        remedies.insert(0, "model.gradient_checkpointing=full")
    parameters = num_parameters(spec)
    if parameters is not None:
        state = f"; {_state_words(config, parameters, shards)}"
    return (
        f"nothing fits in {format_gib(limit)}: even {sizes} a micro-batch "
        f"ran out of memory{reached}{state}; try {', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _remedies_for_state(config: Config, parameters: float, limit_bytes: int) -> list[str]:
    """Return what helps where the state of so many parameters a rank passes the limit."""
    remedies = []
    if config.engine.state_dtype != "bf16" and parameters * 8 < limit_bytes:
        remedies.append("engine.state_dtype=bf16 (half the bytes, coarser updates)")
    if not config.model.lora_rank and parameters * 2 < limit_bytes:
        remedies.append("LoRA (model.lora_rank=16: frozen weights take 2 bytes)")
    return [*remedies, "more GPUs", "a bigger --memory-limit"]


def state_bytes_per_parameter(config: Config) -> int:
    """Return the bytes of master weight, gradient and two Adam moments of one parameter.

    16 in fp32 (4 + 4 + 8). Source: ZeRO, arXiv:1910.02054, section 3.
    """
    return 4 * (2 if config.engine.state_dtype == "bf16" else 4)
