"""Configs read from files, overridden by `key=value`, resolved, saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from autobatch.config.checks import check_config
from autobatch.config.schema import SECTIONS, Config, type_of_key
from autobatch.config.spelling import canonical, check_known
from autobatch.errors import ConfigError
from autobatch.storage import read_text, write_atomic
from autobatch.units import format_value

# What a text that is no value of its key makes OmegaConf or YAML raise.
_UNUSABLE = (OmegaConfBaseException, ValueError, TypeError, OverflowError, RecursionError)
_EVIDENCE = "# ---- evidence: written by `autobatch tune`, checked by `autobatch launch`\n"


def load_config(path: Path | None, overrides: Iterable[str] = ()) -> DictConfig:
    """Return the config of a YAML file (None: the defaults) with `key=value` overrides.

    The result is read-only and keeps interpolations such as `${oc.env:HOME}` unresolved.

    Raises:
        ConfigError: for an unreadable file, an unknown key, a wrong type or a value out of range.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_flatten(_read_yaml(path), where=str(path)))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text!r} is no setting; write key=value, e.g. optim.lr=1e-5")
        if key == "tuning" or key.startswith("tuning."):
            raise ConfigError(
                f"{key} is evidence that `autobatch tune` writes; edit the settings above it"
            )
        values[key] = _parse_value(key, value)
    return with_values(OmegaConf.structured(Config), values)


def with_values(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return a copy of the config with the dotted keys set, checked as `load_config` does."""
    result = OmegaConf.structured(Config)
    _set_readonly(result, False)
    merged = {**_set_values(config), **values}
    for key, value in merged.items():
        key, value = canonical(key, value)
        check_known(key)
        try:
            OmegaConf.update(result, key, value, merge=False)
        except _UNUSABLE as error:
            raise ConfigError(_type_message(key, value)) from error
    _set_readonly(result, True)
    check_config(resolve(result))
    return cast(DictConfig, result)


def resolve(config: DictConfig) -> Config:
    """Return the config as frozen dataclasses, interpolations resolved.

    Raises:
        ConfigError: if an interpolation has no value.
    """
    try:
        return cast(Config, OmegaConf.to_object(config))
    except RecursionError as error:
        raise ConfigError(
            "the config cannot be resolved: an interpolation refers to itself; write its value"
        ) from error
    except _UNUSABLE as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"the config cannot be resolved: {first}; correct that value") from error


def save_config(config: DictConfig, path: Path) -> None:
    """Write the config as YAML that reads back to the same values, interpolations unresolved."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    if plain.get("tuning") is None:
        plain.pop("tuning", None)
    text = ""
    for name, value in plain.items():
        if name == "tuning":
            text += _EVIDENCE
        text += yaml.dump(
            {name: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000
        )
    write_atomic(path, text)


def overridden_keys(overrides: Iterable[str]) -> set[str]:
    """Return the canonical keys that `key=value` texts set."""
    return {canonical(text.partition("=")[0], None)[0] for text in overrides}


def _read_yaml(path: Path) -> Any:
    try:
        read_text(path)  # refuses what OmegaConf would wait for, such as a pipe
        return OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no config {path}; name one, or write it with `autobatch tune`"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{format_value(str(path))[1:-1]} cannot be read as text ({_words(error)}); "
            "check the path and its permissions"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply; write it again") from error
    except (yaml.YAMLError, *_UNUSABLE) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


def _flatten(values: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} holds no settings; it needs sections such as data and model")
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in SECTIONS or name in ("fsdp_config",):
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {name} is {value!r}, not a section with keys")
            for key, inner in value.items():
                if key == "fsdp_config" and isinstance(inner, Mapping):
                    flat.update({f"{name}.{key}.{k}": v for k, v in inner.items()})
                else:
                    flat[f"{name}.{key}"] = inner
        else:
            flat[str(name)] = value
    return flat


def _set_readonly(config: DictConfig, flag: bool) -> None:
    OmegaConf.set_readonly(config, flag)
    for section in SECTIONS:
        OmegaConf.set_readonly(config[section], flag)


def _set_values(config: DictConfig) -> dict[str, Any]:
    """Return the values that differ from the defaults, dotted."""
    plain = OmegaConf.to_container(config, resolve=False)
    default = OmegaConf.to_container(OmegaConf.structured(Config), resolve=False)
    assert isinstance(plain, dict)
    assert isinstance(default, dict)
    changed: dict[str, Any] = {}
    for section in SECTIONS:
        for key, value in plain[section].items():
            if value != default[section][key]:
                changed[f"{section}.{key}"] = value
    if plain["tuning"] is not None:
        changed["tuning"] = plain["tuning"]
    return changed


def _parse_value(key: str, text: str) -> Any:
    """Return the value of a `key=value` text, by the same YAML rules as a file."""
    if _expects_text(canonical(key, None)[0]) and text not in ("null", "~"):
        return text
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(f"value: {text}"), resolve=False)
    except (yaml.YAMLError, *_UNUSABLE):
        return text
    assert isinstance(parsed, dict)
    return parsed["value"]


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _expects_text(key: str) -> bool:
    return type_of_key(key) in ("str", "str | None")


_KIND_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[str]": "a list such as [a, b]",
    "list[float]": "a list of numbers",
    "dict[str, Any]": "the section that `autobatch tune` writes",
    "Any": "text or a list of texts",
}


def _type_message(key: str, value: Any) -> str:
    kind = type_of_key(key) or "Any"
    null = " or null" if kind.endswith(" | None") else ""
    words = _KIND_WORDS[kind.removesuffix(" | None")]
    return f"{key}={format_value(value)} has the wrong type; give {words}{null}"


class _Dumper(yaml.SafeDumper):
    """Writes floats so that every YAML reader reads a float: 1e-05 becomes 1.0e-05."""


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    if text in ("inf", "-inf", "nan"):
        text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}[text]
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _represent_float)
