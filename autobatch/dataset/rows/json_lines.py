"""Rows out of JSON lines, in a stream or several lines at once."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import IO, Any

from autobatch.dataset.rows.stored import DataFile, open_unpacked
from autobatch.errors import DataError

BOM = b"\xef\xbb\xbf"
# Deeper values would exhaust Python's stack wherever they go; no conversation is.
_MOST_DEPTH = 256


class TooDeep:
    """Stands in a row for a value that is nested too deeply."""


def line_parts(
    file: DataFile, *, num_bytes: int, num_rows: int
) -> Iterator[tuple[int, int, bytes]]:
    """Yield the lines of a jsonl file, several at once and not parsed, see `rows_of_lines`.

    Each part has the number of its first line, the number of its rows, and its bytes: about
    `num_bytes` and at most `num_rows`, or one long line.

    Raises:
        DataError: if the file cannot be opened or read.
    """
    first_line = rows = size = 0
    lines: list[bytes] = []
    with open_unpacked(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not lines:
                first_line = number
            lines.append(line)
            size += len(line)
            rows += bool((line.removeprefix(BOM) if number == 1 else line).strip())
            if size >= num_bytes or rows >= num_rows:
                if rows:
                    yield first_line, rows, b"".join(lines)
                lines, rows, size = [], 0, 0
    if rows:
        yield first_line, rows, b"".join(lines)


def rows_of_lines(file: DataFile, lines: bytes, *, first_line: int) -> list[dict[str, Any]]:
    """Return the rows of a part of a jsonl file.

    Raises:
        DataError: if a line is no row.
    """
    return list(json_lines(file, io.BytesIO(lines), first_line=first_line))


def json_lines(
    file: DataFile, stream: IO[bytes], *, first_line: int = 1
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a stream of lines, of which the first has a number in its file.

    Raises:
        DataError: if a line is no UTF-8, no JSON or no object.
    """
    for number, line in enumerate(stream, start=first_line):
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        where = f"{file.path}:{number}"
        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 text; save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:
            if file.kind == "json" and number == 1 and line.lstrip()[:1] == b"{":
                raise DataError(
                    f"{file.path} holds one JSON object over several lines, not rows; write a "
                    "list of objects, or one object a line"
                ) from error
            raise DataError(f"{where} is not valid JSON ({error}); correct the line") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is no JSON object; write one object a line")
        yield shallow(row, line.count(b"[") + line.count(b"{"))


def shallow(row: dict[str, Any], num_open: int) -> dict[str, Any]:
    """Return a row without its deep values; it cannot be deeper than the brackets it opens."""
    if num_open <= _MOST_DEPTH:
        return row
    return {name: TooDeep() if _is_deep(value) else value for name, value in row.items()}


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
