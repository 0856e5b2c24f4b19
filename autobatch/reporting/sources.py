"""Read what earlier commands left in an output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autobatch.config import Config, load_config, resolve
from autobatch.errors import AutobatchError, ConfigError
from autobatch.storage import METRICS_FILE, TUNED_FILE, read_jsonl


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
