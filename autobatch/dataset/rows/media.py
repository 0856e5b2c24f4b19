"""Find media beside the text of rows, without reading it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autobatch.dataset.rows.files import DataFile, read_columns, read_rows
from autobatch.dataset.rows.formats import RowFormat, value_at

_KINDS = ("image", "video", "audio")
_COLUMNS = {f"{kind}{end}": kind for kind in _KINDS for end in ("", "s")}
MEDIA_PARTS = frozenset((*_KINDS, "image_url", "input_image", "video_url", "input_audio"))
_PLACES = 5  # rows named


@dataclass(frozen=True, kw_only=True)
class MediaMismatch:
    """Rows whose placeholders are not as many as their media."""

    num_rows: int
    places: tuple[tuple[int, int], ...]  # (file index, row index) of the first
    example: str  # what the first of them holds


def media_columns(file: DataFile) -> tuple[str, ...]:
    """Return the columns of a file that hold media."""
    return tuple(name for name in read_columns(file) if name in _COLUMNS)


def media_mismatch(
    files: Sequence[DataFile], fmt: RowFormat, columns: Sequence[str]
) -> MediaMismatch | None:
    """Return the rows whose `<image>`, `<video>`, `<audio>` marks do not match their media.

    Of parquet only a small field beside the bytes is read (`path`); a column that has nothing
    but bytes cannot be counted without reading them, and is left out.
    """
    num_rows, example = 0, ""
    places: list[tuple[int, int]] = []
    for file_index, file in enumerate(files):
        light = {name: column for name in columns if (column := _light(file, name))}
        if not light:
            continue
        rows = read_rows(file, [*fmt.columns, *light.values()])
        for row_index, row in enumerate(rows):
            marks = _marks([value_at(row, path) for path in fmt.columns])
            for name in light:
                kind, held = _COLUMNS[name], _count(row.get(name))
                if marks[kind] != held:
                    num_rows += 1
                    example = example or f"{marks[kind]} {kind} marks, {held} in column {name}"
                    if len(places) < _PLACES:
                        places.append((file_index, row_index))
                    break
    if not num_rows:
        return None
    return MediaMismatch(num_rows=num_rows, places=tuple(places), example=example)


def _light(file: DataFile, column: str) -> str | None:
    """Return the path that tells how many media a row has without their bytes, None if none."""
    if file.kind != "parquet":
        return column  # its line is read anyway
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        leaves = pq.ParquetFile(file.path).schema
    except (pa.ArrowException, OSError):  # of another kind of storage: not counted
        return None
    found = [
        leaf.path
        for leaf in (leaves.column(i) for i in range(len(leaves)))
        if leaf.path.split(".")[0] == column
        and ("BYTE_ARRAY" not in leaf.physical_type or leaf.logical_type.type == "STRING")
    ]
    return min(found, key=len, default=None)


def _count(value: Any) -> int:
    if isinstance(value, list):
        return len(value)
    return 0 if value is None else 1


def _marks(values: Sequence[Any]) -> Mapping[str, int]:
    counts = dict.fromkeys(_KINDS, 0)
    for text in _texts(values):
        for kind in _KINDS:
            counts[kind] += text.count(f"<{kind}>")
    return counts


def _texts(value: Any) -> Iterator[str]:
    """Yield every text of a conversation; a media part counts as its mark."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, Mapping):
        kind = str(value.get("type", "")).removesuffix("_url").removeprefix("input_")
        if kind in _KINDS:
            yield f"<{kind}>"
            return
        for name in ("content", "value", "text"):
            yield from _texts(value.get(name))
