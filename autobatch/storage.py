"""Records on disk: versioned JSON, YAML and JSONL, written whole or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from autobatch.errors import AutobatchError
from autobatch.records import SCHEMA_VERSION

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
        AutobatchError: if a field is missing or the schema version is newer than ours.
    """
    version = value.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise AutobatchError(
            f"{where} has schema_version {version}, this autobatch reads {SCHEMA_VERSION}; "
            "write it again with this version"
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
        if value is None:
            return None
        return _decode(next(a for a in args if a is not type(None)), value, where=where)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise AutobatchError(f"{where} is {value!r}, not a mapping; write the file again")
        return from_plain(typing.cast(type, hint), value, where=where)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], v, where=where) for v in value)
        return tuple(_decode(a, v, where=where) for a, v in zip(args, value, strict=True))
    if origin is dict:
        return {k: _decode(args[1], v, where=where) for k, v in value.items()}
    return value


def write_atomic(path: Path, text: str) -> None:
    """Replace a file by `text`; a reader sees the old or the new file, never a part.

    Raises:
        AutobatchError: if the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise AutobatchError(
            f"cannot write {path}: {error.strerror or error}; choose another --out or free space"
        ) from error


def write_json(path: Path, record: Any) -> None:
    """Write a record as indented JSON, atomically."""
    write_atomic(path, json.dumps(to_plain(record), indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Return a JSON file's content.

    Raises:
        AutobatchError: if the file is missing, unreadable or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AutobatchError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise AutobatchError(f"{path} is not valid JSON ({error}); write it again") from error


def read_record(record_type: type[T], path: Path) -> T:
    """Return the record in a JSON file.

    Raises:
        AutobatchError: if the file is missing, damaged or of another kind.
    """
    value = read_json(path)
    if not isinstance(value, Mapping):
        raise AutobatchError(f"{path} holds no {record_type.__name__}; write it again")
    return from_plain(record_type, value, where=str(path))


def append_jsonl(path: Path, record: Any) -> None:
    """Append one record as one line with a single write, so that a kill leaves whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(to_plain(record), ensure_ascii=False) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a JSONL file; a last line cut by a kill is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            if line.endswith("\n") and line.strip():
                yield json.loads(line)


def cache_root() -> Path:
    """Return the folder of token caches: AUTOBATCH_CACHE, else the XDG cache."""
    chosen = os.environ.get("AUTOBATCH_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "autobatch"


def shipped_dir(name: str) -> Path:
    """Return a folder of records shipped with the tool, `gpus` or `lengths`.

    The installed package holds them as `autobatch/profiles`, a checkout as `profiles`.

    Raises:
        AutobatchError: if neither is there.
    """
    package = Path(__file__).parent
    for root in (package, package.parent):
        folder = root / "profiles" / name
        if folder.is_dir():
            return folder
    raise AutobatchError(
        f"{package / 'profiles' / name} is missing, so this installation is incomplete; "
        "install autobatch-sft again"
    )


def make_out_dir(path: Path) -> Path:
    """Create an output folder that git ignores, and return it.

    Raises:
        AutobatchError: if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutobatchError(
            f"cannot make the output folder {path}: {error.strerror or error}; choose another --out"
        ) from error
    ignore = path / ".gitignore"
    if not ignore.exists():
        write_atomic(ignore, "*\n")
    return path
