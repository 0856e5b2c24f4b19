"""`autobatch run`: profile, tune, launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autobatch.api.inputs import RowProgress, Talk, data_keys, model_dir, once
from autobatch.api.launch_command import LaunchReport, launch
from autobatch.api.profile_command import profile
from autobatch.api.tune_command import TuneReport, tune
from autobatch.config import load_config, resolve
from autobatch.errors import ConfigError
from autobatch.model import read_model_spec
from autobatch.records import LengthProfile, Trial
from autobatch.storage import DEFAULT_OUT


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What the three commands did."""

    profile: LengthProfile
    tuned: TuneReport
    launched: LaunchReport


def run(
    data: Sequence[str],
    *,
    model: str,
    tokenizer: str | None = None,
    format: str = "auto",
    keys: Mapping[str, str] | None = None,
    out: str | Path = DEFAULT_OUT,
    overrides: Sequence[str] = (),
    torchrun_args: Sequence[str] = (),
    talk: Talk,
    on_profile: Callable[[LengthProfile], None] | None = None,
    on_trial: Callable[[Trial, str], None] | None = None,
    on_tuned: Callable[[TuneReport], None] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_start: Callable[[int], None] | None = None,
    progress: RowProgress | None = None,
    **tune_arguments: Any,
) -> RunReport:
    """Measure the data, search the settings, train. `tune_arguments` go to `tune`.

    Raises:
        AutobatchError: as the three commands do; a model without weights before any work.
    """
    model = model_dir(model)
    spec = read_model_spec(model)
    config = resolve(load_config(None, overrides))
    if not spec.has_weights and config.model.init != "random":
        raise ConfigError(
            f"{model} holds no weights (*.safetensors); give a directory with weights (for a "
            "model of the Hub `hf download OWNER/NAME --local-dir DIR` makes one), or "
            "model.init=random to train from random ones"
        )
    measured = profile(
        data,
        model=model,
        tokenizer=tokenizer or config.model.tokenizer_path,
        format=config.data.format if format == "auto" else format,
        keys={**data_keys(config), **(keys or {})},
        out=out,
        progress=progress,
        talk=talk,
    )
    if on_profile is not None:
        on_profile(measured)
    tell = once(talk)  # `launch` looks again at what `tune` looked at
    tuned = tune(out=out, overrides=overrides, talk=tell, on_trial=on_trial, **tune_arguments)
    if on_tuned is not None:
        on_tuned(tuned)
    launched = launch(
        tuned.path,
        out=out,
        torchrun_args=torchrun_args,
        talk=tell,
        on_row=on_row,
        on_start=on_start,
    )
    return RunReport(profile=measured, tuned=tuned, launched=launched)
