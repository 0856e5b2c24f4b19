"""The config that a search starts from: what flags, profile and machine say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from autobatch.api.inputs import model_dir
from autobatch.api.machine import Machine
from autobatch.config import load_config, overridden_keys, with_values
from autobatch.dataset.lengths.shipped import shipped_profile
from autobatch.errors import AutobatchError, ConfigError
from autobatch.records import LengthProfile
from autobatch.storage import PROFILE_FILE, read_record

SWITCHES = {"auto": None, "on": True, "off": False}


def flag_settings(
    *,
    train_batch_size: int | None,
    max_length: int | None,
    remove_padding: str,
    liger: str,
    gradient_checkpointing: str,
) -> list[str]:
    """Return the settings that flags stand for, as `key=value`.

    Raises:
        ConfigError: if a switch is not auto, on or off.
    """
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


def refuse_machine_keys(overrides: Sequence[str]) -> None:
    """Refuse the keys that tune itself writes.

    Raises:
        ConfigError: naming the flag to use.
    """
    keys = overridden_keys(overrides)
    for key, flag in (
        ("trainer.device", "--device cpu"),
        ("trainer.nproc_per_node", "--num-gpus N"),
        ("trainer.nnodes", "--num-gpus N"),
    ):
        if key in keys:
            raise ConfigError(f"{key} is decided by where tune steps; use {flag} instead")


def read_profile(
    profile: str | Path | None, out_dir: Path, settings: Sequence[str]
) -> LengthProfile | None:
    """Return the profile to take data and model from; None if the settings name the data.

    An existing file wins over the name of a shipped profile.

    Raises:
        AutobatchError: if there is none, or it is damaged; if a shipped one meets named data.
    """
    names_data = "data.train_files" in overridden_keys(settings)
    path = Path(profile) if profile is not None else out_dir / PROFILE_FILE
    if path.is_file() or (profile is None and path.exists()):
        known = read_record(LengthProfile, path)
        if not known.complete:
            raise AutobatchError(
                f"{path} tells of a part of the data only, and tuning needs every row; run "
                "`autobatch profile` again without --sample, and let it finish"
            )
    elif profile is not None:
        known = shipped_profile(str(profile))
    elif names_data:
        return None
    else:
        raise AutobatchError(
            f"there is no {path}; run `autobatch profile DATA --model MODEL` first, or give "
            "--profile FILE or the name of a shipped one, such as gsm8k"
        )
    if known.origin is not None and names_data:
        raise ConfigError(
            f"the shipped profile {known.origin.name} stands in for data, and data.train_files "
            "names data; leave one of them out"
        )
    return known


def base_config(
    profile: LengthProfile | None,
    model: str | None,
    out_dir: Path,
    machine: Machine,
    settings: Sequence[str],
) -> DictConfig:
    """Return the config before the search; a setting wins over a flag's, that over the profile's.

    A shipped profile gives no value: its lengths are all it has.
    """
    values: dict[str, Any] = {
        "trainer.device": machine.device,
        "trainer.nproc_per_node": machine.data_parallel_size,
        "trainer.output_dir": str((out_dir / "run").absolute()),
    }
    if profile is not None and profile.origin is None:
        values["data.train_files"] = list(profile.data.files)
        values["data.format"] = profile.data.format
        values.update({f"data.{name}": path for name, path in profile.data.keys.items()})
        values["model.path"] = profile.model
        if profile.tokenizer != profile.model:
            values["model.tokenizer_path"] = profile.tokenizer
    if model is not None:
        if "model.path" in values and values.get("model.tokenizer_path") is None:
            assert profile is not None
            values["model.tokenizer_path"] = profile.tokenizer
        values["model.path"] = model_dir(model)
        if values.get("model.tokenizer_path") == values["model.path"]:
            values.pop("model.tokenizer_path")
    chosen = load_config(None, settings)
    keys = overridden_keys(settings)
    kept = {key: value for key, value in values.items() if key not in keys}
    return with_values(chosen, kept)
