"""Stream rows out of JSON lines, JSON lists, comma- and tab-separated values."""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Iterator
from typing import IO, Any

from autobatch.dataset.rows.stored import DataFile, open_unpacked
from autobatch.errors import DataError

_BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 2**18
# A value cut by the end of what was read fails within its last characters (`-Infinit`, `\u12`).
_CUT_CHARS = 16
# Deeper values would exhaust Python's stack wherever they go; no conversation is.
_MOST_DEPTH = 256


class TooDeep:
    """Stands in a row for a value that is nested too deeply."""


def text_rows(file: DataFile) -> Iterator[dict[str, Any]]:
    """Yield the rows of a jsonl, json, csv or tsv file, one at a time in memory.

    Raises:
        DataError: if the file is damaged, no UTF-8, or a line or item is no row.
    """
    with open_unpacked(file) as stream:
        if file.kind in ("csv", "tsv"):
            yield from _separated(file, stream)
            return
        if file.kind == "json":
            start = stream.read(4096)
            if start.removeprefix(_BOM).lstrip()[:1] == b"[":
                yield from _json_list(file, start, stream)
                return
        else:
            yield from _json_lines(file, stream)
            return
    with open_unpacked(file) as stream:  # what was decompressed cannot be put back
        yield from _json_lines(file, stream)


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
            rows += bool((line.removeprefix(_BOM) if number == 1 else line).strip())
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
    return list(_json_lines(file, io.BytesIO(lines), first_line=first_line))


def _json_lines(
    file: DataFile, stream: IO[bytes], *, first_line: int = 1
) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(stream, start=first_line):
        if number == 1:
            line = line.removeprefix(_BOM)
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
        yield _shallow(row, line.count(b"[") + line.count(b"{"))


def _json_list(file: DataFile, start: bytes, stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the items of a list: what is read is kept until the item in it is whole."""
    decoder = json.JSONDecoder()
    text = _Text(file, start, stream)
    text.skip("[")
    number = 0
    while True:
        if text.next_sign() in ("]", ""):
            break
        if number:
            if text.next_sign() != ",":
                raise _no_json(file, number, "no comma after the item before")
            text.skip(",")
            text.next_sign()
        while True:
            try:
                row, end = decoder.raw_decode(text.kept, text.place)
            except json.JSONDecodeError as error:
                is_cut = error.pos >= len(text.kept) - _CUT_CHARS
                is_cut = is_cut or error.msg.startswith("Unterminated string")
                if not is_cut or not text.read_more():
                    raise _no_json(file, number, error.msg) from error
            except (ValueError, RecursionError) as error:  # too many digits, too deep
                raise _no_json(file, number, str(error)) from error
            else:
                break
        if not isinstance(row, dict):
            raise DataError(f"{file.path} item {number} is no JSON object; make each item a row")
        num_open = text.kept.count("[", text.place, end) + text.kept.count("{", text.place, end)
        text.place = end
        number += 1
        yield _shallow(row, num_open)
    if text.next_sign() != "]":
        raise _no_json(file, number, "the list does not end")
    text.skip("]")
    if text.next_sign():
        raise _no_json(file, number, "something follows the list")


def _shallow(row: dict[str, Any], num_open: int) -> dict[str, Any]:
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


def _no_json(file: DataFile, number: int, reason: str) -> DataError:
    return DataError(f"{file.path} item {number} is not valid JSON ({reason}); correct it")


class _Text:
    """The part of a text that is in memory, and a place in it."""

    def __init__(self, file: DataFile, start: bytes, stream: IO[bytes]) -> None:
        self._file = file
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.kept = self._decode(start)
        self.place = 0

    def next_sign(self) -> str:
        """Move over white space and return the sign there, "" at the end."""
        while True:
            while self.place < len(self.kept) and self.kept[self.place] in " \t\r\n":
                self.place += 1
            if self.place < len(self.kept) or not self.read_more():
                return self.kept[self.place : self.place + 1]

    def skip(self, sign: str) -> None:
        """Move over a sign that is there."""
        assert self.next_sign() == sign
        self.place += 1

    def read_more(self) -> bool:
        """Forget what was passed, read as much again as is kept; say if there was more."""
        self.kept, self.place = self.kept[self.place :], 0
        # as much again: an item of n bytes is parsed log n times, not n
        piece = self._stream.read(max(_CHUNK_BYTES, len(self.kept)))
        self.kept += self._decode(piece)
        return bool(piece)

    def _decode(self, piece: bytes) -> str:
        try:
            return self._decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._file.path} is not UTF-8 text; save the file as UTF-8"
            ) from error


def _separated(file: DataFile, stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # 131,072 characters otherwise: a long document
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    rows = csv.DictReader(text, delimiter="\t" if file.kind == "tsv" else ",", strict=True)
    try:
        for row in rows:
            if None in row or None in row.values():  # type: ignore[comparison-overlap]
                raise DataError(
                    f"{file.path}:{rows.line_num} has another number of values than its first "
                    "line has names; quote values that hold the separator"
                )
            yield row
    except UnicodeDecodeError as error:
        raise DataError(f"{file.path} is not UTF-8 text; save the file as UTF-8") from error
    except csv.Error as error:
        raise DataError(
            f"{file.path}:{rows.line_num} is not valid {file.kind} ({error}); correct the line"
        ) from error
    finally:
        text.detach()  # the stream is closed by who opened it
