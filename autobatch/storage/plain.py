"""Records as dicts, lists and scalars: written versioned, checked field by field when read."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from autobatch.errors import AutobatchError
from autobatch.records import SCHEMA_VERSION
from autobatch.units import format_value

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Return a record as dicts, lists and scalars, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        return value.item()  # numpy scalars
    return value


def from_plain(record_type: type[T], value: Mapping[str, Any], *, where: str) -> T:
    """Return the record that `to_plain` wrote; unknown fields are left out.

    Raises:
        AutobatchError: if a field is missing or of a wrong type, or the schema version is
            another than ours.
    """
    version = value.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise AutobatchError(
            f"{where} has schema_version {format_value(version)}, this autobatch reads "
            f"{SCHEMA_VERSION}; write it again with this version"
        )
    hints = typing.get_type_hints(record_type)
    known = {f.name: f for f in dataclasses.fields(record_type)}  # type: ignore[arg-type]
    missing = [
        name
        for name, f in known.items()
        if name not in value
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise AutobatchError(
            f"{where} lacks {', '.join(missing)}; it is no {record_type.__name__}, or was cut: "
            "write it again"
        )
    return record_type(
        **{
            name: _decode(hints[name], value[name], where=f"{where}: {name}")
            for name in known
            if name in value
        }
    )


def _decode(hint: Any, value: Any, *, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        return _decode(next(a for a in args if a is not types.NoneType), value, where=where)
    if dataclasses.is_dataclass(hint):
        return from_plain(
            typing.cast(type, hint), _checked(Mapping, value, "a mapping", where), where=where
        )
    if origin is tuple:
        items = _checked((list, tuple), value, "a list", where)
        kinds = [args[0]] * len(items) if args[1:] == (Ellipsis,) else args
        if len(items) != len(kinds):
            raise _wrong_type(items, f"a list of {len(kinds)}", where)
        return tuple(
            _decode(kind, item, where=f"{where}[{i}]")
            for i, (kind, item) in enumerate(zip(kinds, items, strict=True))
        )
    if origin is dict:
        mapping = _checked(Mapping, value, "a mapping", where)
        return {
            _decode(args[0], k, where=where): _decode(args[1], v, where=f"{where}.{k}")
            for k, v in mapping.items()
        }
    if hint in _SCALARS:
        accepted, name = _SCALARS[hint]
        if isinstance(value, bool) and hint is not bool:  # to Python, a bool is an int
            raise _wrong_type(value, name, where)
        return _checked(accepted, value, name, where)
    return value


_SCALARS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
    str: (str, "text"),
}


def _checked(kind: Any, value: Any, name: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise _wrong_type(value, name, where)
    return value


def _wrong_type(value: Any, name: str, where: str) -> AutobatchError:
    return AutobatchError(f"{where} is {format_value(value)}, not {name}; write the file again")
