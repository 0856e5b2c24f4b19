"""Stream rows out of files of text: JSON lines and lists, comma- and tab-separated values."""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Iterator
from typing import IO, Any

from autobatch.dataset.rows.json_lines import BOM, json_lines, shallow
from autobatch.dataset.rows.stored import DataFile, open_unpacked
from autobatch.errors import DataError

_CHUNK_BYTES = 2**18
# A value cut by the end of what was read fails within its last characters (`-Infinit`, `\u12`).
_CUT_CHARS = 16


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
            if start.removeprefix(BOM).lstrip()[:1] == b"[":
                yield from _json_list(file, start, stream)
                return
        else:
            yield from json_lines(file, stream)
            return
    with open_unpacked(file) as stream:  # what was decompressed cannot be put back
        yield from json_lines(file, stream)


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
        yield shallow(row, num_open)
    if text.next_sign() != "]":
        raise _no_json(file, number, "the list does not end")
    text.skip("]")
    if text.next_sign():
        raise _no_json(file, number, "something follows the list")


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
