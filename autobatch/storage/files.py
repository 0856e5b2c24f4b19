"""JSON, JSONL and text on disk: written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from autobatch.errors import AutobatchError
from autobatch.storage.plain import from_plain, to_plain

T = TypeVar("T")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file by `content`; a reader sees the old or the new file, never a part.

    Raises:
        AutobatchError: if the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content if isinstance(content, bytes) else _encode(content))
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


def read_text(path: Path) -> str:
    """Return the UTF-8 text of a regular file.

    Raises:
        OSError: as `open` does, also for a pipe or a device: reading it might never end.
        UnicodeDecodeError: if it is no UTF-8 text.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.read_text(encoding="utf-8")


def _encode(text: str) -> bytes:
    # a file name that is no UTF-8 holds lone surrogates; \udcff is JSON's own way to write one
    return text.encode("utf-8", "backslashreplace")


def read_json(path: Path) -> Any:
    """Return a JSON file's content.

    Raises:
        AutobatchError: if the file is missing, unreadable or no JSON.
    """
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise AutobatchError(
            f"cannot read {path}: {error.strerror or error}; correct the path or its permissions"
        ) from error
    except RecursionError as error:
        raise AutobatchError(f"{path} is nested too deeply; write it again") from error
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
    """Append one record as one line with a single write, so that a kill leaves whole lines.

    Raises:
        AutobatchError: if the file cannot be written.
    """
    line = _encode(json.dumps(to_plain(record), ensure_ascii=False) + "\n")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)
    except OSError as error:
        raise AutobatchError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another folder"
        ) from error


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of a JSONL file; a last line cut by a kill is left out.

    Raises:
        AutobatchError: if the file cannot be read, or a line is no JSON object.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            for line in stream:
                if line.endswith("\n") and line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError("no object")
                    yield row
    except FileNotFoundError:
        return
    except OSError as error:
        raise AutobatchError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise AutobatchError(
            f"{path} holds a line that is not valid JSON ({error}); remove that line"
        ) from error
