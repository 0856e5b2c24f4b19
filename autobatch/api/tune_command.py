"""`autobatch tune`: the fastest batch settings whose worst micro-batch was stepped and fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from autobatch.api.inputs import (
    Inputs,
    RowProgress,
    Talk,
    check_inputs,
    left_out,
    read_inputs,
    shipped_inputs,
)
from autobatch.api.machine import Machine, find_machine, prober_on
from autobatch.api.tune_settings import (
    base_config,
    flag_settings,
    read_profile,
    refuse_machine_keys,
)
from autobatch.config import Config, overridden_keys, resolve, with_values
from autobatch.dataset.tokens.truncation import cut_lengths, trainable
from autobatch.errors import ConfigError, NothingFitsError
from autobatch.hardware.environment import num_cores
from autobatch.preflight.batch import arithmetic
from autobatch.preflight.rule import warnings_or_raise
from autobatch.preflight.run import check_run
from autobatch.records import Candidate, Certificate, Toggles, Trial
from autobatch.storage import DEFAULT_OUT, TUNED_FILE, make_out_dir
from autobatch.tuning.certificate import certify
from autobatch.tuning.objective import state_too_large_sentence
from autobatch.tuning.result import SearchResult
from autobatch.tuning.search import search
from autobatch.tuning.verdict import write_verdict
from autobatch.units import format_gib, round_up

DEFAULT_SECS = 600.0


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """The verdict of a search, and where it was written."""

    path: Path
    gpu: str
    data_parallel_size: int
    memory_limit_bytes: int
    result: SearchResult
    certificate: Certificate


def tune(
    *,
    model: str | None = None,
    profile: str | Path | None = None,
    out: str | Path = DEFAULT_OUT,
    gpu: str | None = None,
    device: str | None = None,
    num_gpus: int = 1,
    memory_limit: str | int | None = None,
    headroom: str | int | None = None,
    train_batch_size: int | None = None,
    max_length: int | None = None,
    remove_padding: str = "auto",
    liger: str = "auto",
    gradient_checkpointing: str = "auto",
    search_by: str = "bisect",
    seconds: float | None = None,
    overrides: Sequence[str] = (),
    talk: Talk,
    on_trial: Callable[[Trial, str], None] | None = None,
    progress: RowProgress | None = None,
) -> TuneReport:
    """Search the settings of TUNABLE_KEYS by real steps, and write `out`/tuned.yaml.

    Data and model come from the profile unless told; a TUNABLE key in `overrides` is fixed. A
    shipped profile (`profile` is its name) has lengths alone: the verdict covers any order of
    them, every token counts as a label, and `launch` has to be given the data.

    Raises:
        NothingFitsError: if no candidate stays within the memory limit.
        AutobatchError: if an argument, the data or the model cannot be used.
    """
    if search_by != "bisect":
        raise ConfigError(f"--search {search_by} is not in this version; use bisect")
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"--seconds {seconds:g} is not positive; give e.g. 600")
    machine = find_machine(
        device=device,
        gpu=gpu,
        num_gpus=num_gpus,
        memory_limit=memory_limit,
        headroom=headroom,
        talk=talk,
    )
    out_dir = make_out_dir(Path(out))
    flags = flag_settings(
        train_batch_size=train_batch_size,
        max_length=max_length,
        remove_padding=remove_padding,
        liger=liger,
        gradient_checkpointing=gradient_checkpointing,
    )
    settings = [*flags, *overrides]
    refuse_machine_keys(overrides)
    known = read_profile(profile, out_dir, settings)
    config = base_config(known, model, out_dir, machine, settings)
    origin = None if known is None else known.origin
    if known is None or origin is None:
        inputs = read_inputs(resolve(config), progress=progress)
    else:
        inputs = shipped_inputs(resolve(config), known, talk=talk)
    config, inputs = _with_batch_defaults(config, inputs, settings, talk)
    resolved = resolve(config)
    _tell_and_check(inputs, resolved, out_dir, machine, talk)
    ranks = machine.data_parallel_size
    with prober_on(machine, config, out_dir) as runner:
        too_large = state_too_large_sentence(
            resolved, inputs.spec, limit_bytes=machine.limit_bytes, num_shards=ranks
        )
        if too_large is not None:
            raise NothingFitsError(too_large)
        result = search(
            config=resolved,
            spec=inputs.spec,
            prober=runner,
            plan_of=lambda candidate: inputs.plan(candidate, num_ranks=ranks),
            num_ranks=ranks,
            fixed_keys=overridden_keys(settings),
            seconds=DEFAULT_SECS if seconds is None else seconds,
            out_dir=out_dir,
            on_trial=on_trial,
        )
    certificate = certify(
        plan=inputs.plan(result.winner.candidate, num_ranks=ranks), winner=result.winner
    )
    path = write_verdict(
        config=config,
        result=result,
        certificate=certificate,
        gpu=machine.gpu,
        spec=inputs.spec,
        environment=machine.environment,
        shipped_profile=None if origin is None else origin.name,
        path=out_dir / TUNED_FILE,
    )
    return TuneReport(
        path=path,
        gpu=machine.gpu,
        data_parallel_size=ranks,
        memory_limit_bytes=machine.limit_bytes,
        result=result,
        certificate=certificate,
    )


def _with_batch_defaults(
    config: DictConfig, inputs: Inputs, settings: Sequence[str], talk: Talk
) -> tuple[DictConfig, Inputs]:
    """Set max_length and train_batch_size where the user left them open; say so."""
    values: dict[str, Any] = {}
    resolved = inputs.config
    if resolved.data.max_length is None:
        longest = inputs.profile.length.max
        values["data.max_length"] = round_up(longest, 8)
        talk(
            f"data.max_length={values['data.max_length']}: the longest row, {longest} tokens, "
            "rounded up to 8; nothing is cut"
        )
        positions = inputs.spec.max_position_embeddings
        if positions is not None and longest > positions:
            advice = inputs.profile.max_length
            raise ConfigError(
                f"the longest row has {longest} tokens, the model takes {positions}; choose "
                f"--max-length (recommended {min(advice.recommended or positions, positions)}: "
                f"{advice.reason}) "
                "with data.truncation=drop or right"
            )
    config = with_values(config, values)
    resolved = resolve(config)
    cut = cut_lengths(
        inputs.cache, max_length=resolved.data.max_length, truncation=resolved.data.truncation
    )
    num_trainable = len(trainable(cut))
    for words in left_out(inputs.cache, cut):
        talk(words)
    asked = resolved.data.train_batch_size
    if 0 < num_trainable < asked:
        source = "as asked" if "data.train_batch_size" in overridden_keys(settings) else "default"
        talk(f"data.train_batch_size={num_trainable}: lowered from {asked} ({source}) to the rows")
        config = with_values(config, {"data.train_batch_size": num_trainable})
        resolved = resolve(config)
    return config, Inputs(
        config=resolved, profile=inputs.profile, cache=inputs.cache, spec=inputs.spec
    )


def _tell_and_check(
    inputs: Inputs, config: Config, out_dir: Path, machine: Machine, talk: Talk
) -> None:
    smallest = Candidate(toggles=Toggles(use_remove_padding=False), micro_batch_size_per_gpu=1)
    plan = inputs.plan(smallest, num_ranks=config.trainer.nproc_per_node)
    warnings = check_inputs(inputs, plan, needs_weights=False)
    findings = warnings_or_raise(
        check_run(
            config,
            Path(config.trainer.output_dir),
            num_cores=num_cores(),
            num_gpus=machine.data_parallel_size,
            torchrun_args=(),
        )
    )
    for message in [*warnings, *(finding.message for finding in findings)]:
        talk(f"warning: {message}")
    talk(arithmetic(plan))
    talk(
        f"limit {format_gib(machine.limit_bytes)} a rank, {machine.data_parallel_size} rank(s) "
        f"on {machine.device}; every size is stepped for real; trials go to "
        f"{out_dir / 'trials.jsonl'}"
    )
