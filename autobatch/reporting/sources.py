"""Read what earlier commands left in an output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autobatch.config import Config, load_config, resolve
from autobatch.errors import AutobatchError, ConfigError
from autobatch.records import LengthProfile, Trial
from autobatch.storage import from_plain, read_jsonl, read_record

PROFILE_FILE = "profile.json"
TRIALS_FILE = "trials.jsonl"
TUNED_FILE = "tuned.yaml"
METRICS_FILE = "metrics.jsonl"


def read_profile(out_dir: Path) -> LengthProfile:
    """Return the length profile that `autobatch profile` left in a folder.

    Raises:
        AutobatchError: if there is none, or it is damaged.
    """
    path = out_dir / PROFILE_FILE
    if not path.exists():
        raise AutobatchError(f"there is no {path}; write it with `autobatch profile`")
    return read_record(LengthProfile, path)


def read_trials(out_dir: Path) -> tuple[Trial, ...]:
    """Return the trials of a search, in the order they landed; none while there is no file.

    Raises:
        AutobatchError: if a line is damaged.
    """
    path = out_dir / TRIALS_FILE
    return tuple(from_plain(Trial, row, where=str(path)) for row in _rows(path))


def read_tuned(path: Path) -> Config:
    """Return a tuned config, from the file itself or from the folder that holds tuned.yaml.

    Raises:
        ConfigError: if there is none, or its `tuning` section is missing.
    """
    file = path / TUNED_FILE if path.is_dir() else path
    config = resolve(load_config(file))
    if config.tuning is None:
        raise ConfigError(f"{file} has no tuning section; write it with `autobatch tune`")
    return config


def read_metrics(run_dir: Path) -> tuple[dict[str, Any], ...]:
    """Return the rows of a run's metrics.jsonl, one an optimizer step.

    Raises:
        AutobatchError: if a line is damaged.
    """
    return tuple(_rows(run_dir / METRICS_FILE))


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = list(read_jsonl(path))
    except OSError as error:
        raise AutobatchError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise AutobatchError(
            f"{path} holds a line that is not valid JSON ({error}); remove that line"
        ) from error
    for row in rows:
        if not isinstance(row, dict):
            raise AutobatchError(f"{path} holds {row!r}, which is no record; remove that line")
    return rows
