"""`autobatch tune`: the fastest batch settings whose worst micro-batch was stepped and fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from autobatch.api.inputs import Inputs, RowProgress, Talk, absolute, check_inputs, read_inputs
from autobatch.api.machine import Machine, find_machine, prober_on
from autobatch.config import Config, load_config, overridden_keys, resolve, with_values
from autobatch.dataset.truncation import cut_lengths, trainable
from autobatch.errors import AutobatchError, ConfigError
from autobatch.hardware.environment import num_cores
from autobatch.preflight.batch import arithmetic
from autobatch.preflight.rule import warnings_or_raise
from autobatch.preflight.run import check_run
from autobatch.records import Candidate, Certificate, LengthProfile, Toggles, Trial
from autobatch.storage import DEFAULT_OUT, PROFILE_FILE, TUNED_FILE, make_out_dir, read_record
from autobatch.tuning.certificate import certify
from autobatch.tuning.result import SearchResult
from autobatch.tuning.search import search
from autobatch.tuning.verdict import write_verdict
from autobatch.units import format_gib, round_up

DEFAULT_SECS = 600.0
SWITCHES = {"auto": None, "on": True, "off": False}


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

    Data and model come from the profile unless told; a TUNABLE key in `overrides` is fixed.

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
    flags = _flag_settings(
        train_batch_size=train_batch_size,
        max_length=max_length,
        remove_padding=remove_padding,
        liger=liger,
        gradient_checkpointing=gradient_checkpointing,
    )
    settings = [*flags, *overrides]
    _refuse_machine_keys(overrides)
    known = _read_profile(profile, out_dir, settings)
    config = _base_config(known, model, out_dir, machine, settings)
    inputs = read_inputs(resolve(config), progress=progress)
    config, inputs = _with_batch_defaults(config, inputs, settings, talk)
    resolved = resolve(config)
    _tell_and_check(inputs, resolved, out_dir, machine, talk)
    ranks = machine.data_parallel_size
    with prober_on(machine, config, out_dir) as runner:
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


def _flag_settings(
    *,
    train_batch_size: int | None,
    max_length: int | None,
    remove_padding: str,
    liger: str,
    gradient_checkpointing: str,
) -> list[str]:
    settings = []
    if train_batch_size is not None:
        settings.append(f"data.train_batch_size={train_batch_size}")
    if max_length is not None:
        settings.append(f"data.max_length={max_length}")
    for flag, value in (("--remove-padding", remove_padding), ("--liger", liger)):
        if value not in SWITCHES:
            raise ConfigError(f"{flag} {value} is unknown; use auto, on or off")
    if remove_padding != "auto":
        settings.append(f"model.use_remove_padding={SWITCHES[remove_padding]}")
    if liger != "auto":
        settings.append(f"model.use_liger={SWITCHES[liger]}")
    if liger == "on":
        settings.append("model.loss_kernel=fused")
    if gradient_checkpointing != "auto":
        settings.append(f"model.gradient_checkpointing={gradient_checkpointing}")
    return settings


def _refuse_machine_keys(overrides: Sequence[str]) -> None:
    keys = overridden_keys(overrides)
    for key, flag in (
        ("trainer.device", "--device cpu"),
        ("trainer.nproc_per_node", "--num-gpus N"),
        ("trainer.nnodes", "--num-gpus N"),
    ):
        if key in keys:
            raise ConfigError(f"{key} is decided by where tune steps; use {flag} instead")


def _read_profile(
    profile: str | Path | None, out_dir: Path, settings: Sequence[str]
) -> LengthProfile | None:
    """Return the profile to take data and model from; None if the settings name the data."""
    path = Path(profile) if profile is not None else out_dir / PROFILE_FILE
    if path.exists():
        known = read_record(LengthProfile, path)
        if not known.complete:
            raise AutobatchError(
                f"{path} tells of a part of the data only, and tuning needs every row; run "
                "`autobatch profile` again without --sample, and let it finish"
            )
        return known
    if profile is None and "data.train_files" in overridden_keys(settings):
        return None
    raise AutobatchError(
        f"there is no {path}; run `autobatch profile DATA --model MODEL` first, or give --profile"
    )


def _base_config(
    profile: LengthProfile | None,
    model: str | None,
    out_dir: Path,
    machine: Machine,
    settings: Sequence[str],
) -> DictConfig:
    values: dict[str, Any] = {
        "trainer.device": machine.device,
        "trainer.nproc_per_node": machine.data_parallel_size,
        "trainer.output_dir": str((out_dir / "run").absolute()),
    }
    if profile is not None:
        values["data.train_files"] = list(profile.data.files)
        values["data.format"] = profile.data.format
        values.update({f"data.{name}": path for name, path in profile.data.keys.items()})
        values["model.path"] = profile.model
        if profile.tokenizer != profile.model:
            values["model.tokenizer_path"] = profile.tokenizer
    if model is not None:
        if profile is not None and values.get("model.tokenizer_path") is None:
            values["model.tokenizer_path"] = profile.tokenizer
        values["model.path"] = absolute(model)
        if values.get("model.tokenizer_path") == values["model.path"]:
            values.pop("model.tokenizer_path")
    chosen = load_config(None, settings)
    keys = overridden_keys(settings)
    kept = {key: value for key, value in values.items() if key not in keys}
    return with_values(chosen, kept)


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
                f"--max-length (recommended {min(advice.recommended, positions)}: {advice.reason}) "
                "with data.truncation=drop or right"
            )
    config = with_values(config, values)
    resolved = resolve(config)
    cut = cut_lengths(
        inputs.cache, max_length=resolved.data.max_length, truncation=resolved.data.truncation
    )
    num_trainable = len(trainable(cut))
    for count, words in (
        (cut.num_cut, "are cut"),
        (cut.num_dropped, "are dropped"),
        (cut.num_without_labels, "have no label token and are left out"),
    ):
        if count:
            talk(f"{count} of {inputs.cache.num_samples} samples {words}")
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
