"""Cards known by name, read from the shipped records."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from autobatch.errors import AutobatchError, ConfigError
from autobatch.records import GpuSpec
from autobatch.storage import from_plain, shipped_dir

_BRAND = "nvidia "  # older drivers print some names without it


def read_gpu(path: Path) -> GpuSpec:
    """Return the card that a YAML file describes.

    Raises:
        AutobatchError: if the file cannot be read or is no card.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AutobatchError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise AutobatchError(f"{path} is no UTF-8 text; write it again") from error
    except yaml.YAMLError as error:
        raise AutobatchError(f"{path} is not valid YAML; write it again") from error
    if not isinstance(value, Mapping):
        raise AutobatchError(f"{path} holds no GpuSpec; write it again")
    return from_plain(GpuSpec, value, where=str(path))


@cache
def all_gpus() -> tuple[GpuSpec, ...]:
    """Return every named card, sorted by name.

    Raises:
        AutobatchError: if the shipped records are missing or damaged.
    """
    specs = (read_gpu(path) for path in shipped_dir("gpus").glob("*.yaml"))
    return tuple(sorted(specs, key=lambda spec: spec.name))


def named_gpu(name: str) -> GpuSpec:
    """Return the card of a name such as `a100-80g`, or of what nvidia-smi prints; case is ignored.

    Raises:
        ConfigError: if no card has this name.
    """
    found = find_gpu(name)
    if found is not None:
        return found
    known = {spec.name: spec.name for spec in all_gpus()}
    known |= {_plain(spec.vendor_name): spec.name for spec in all_gpus()}
    close = difflib.get_close_matches(_plain(name), known, n=3, cutoff=0.5)
    nearest = list(dict.fromkeys(known[match] for match in close))
    hint = f"did you mean {' or '.join(nearest)}? " if nearest else ""
    raise ConfigError(
        f"GPU {name!r} is not known; {hint}use one of {', '.join(s.name for s in all_gpus())}, "
        "or the name that nvidia-smi prints for one of them"
    )


def find_gpu(name: str) -> GpuSpec | None:
    """Return the card of a name, as `named_gpu` does, or None."""
    wanted = _plain(name)
    for spec in all_gpus():
        if wanted in (spec.name, _plain(spec.vendor_name)):
            return spec
    return None


def _plain(name: str) -> str:
    return " ".join(name.lower().split()).removeprefix(_BRAND)
