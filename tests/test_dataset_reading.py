"""Rows as Arrow has them are the rows that a file holds, whichever process reads them."""

from __future__ import annotations

import datetime
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autobatch.dataset.rows.files import find_files
from autobatch.dataset.rows.formats import RowFormat
from autobatch.dataset.rows.reading import UnreadRows, all_parts, all_rows
from autobatch.errors import DataError
from tests.tiny import write_jsonl

COLUMNS = RowFormat(name="messages", keys={"messages_key": "messages", "tools_key": "tools"})


def unfolded(parts) -> list:
    """Return the rows of parts that went through a pickle, as between processes."""
    rows = []
    for part in parts:
        sent = pickle.loads(pickle.dumps(part))
        rows += sent.rows() if isinstance(sent, UnreadRows) else [sent]
    return rows


def conversation(i: int) -> dict:
    """Return a row with nulls, an empty list and a field that most rows lack."""
    turns = [{"role": "user", "content": f"u{i}", "name": None if i % 3 else "n"}] * (i % 4)
    return {"messages": turns, "tools": None if i % 2 else "[]", "unread": i}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_parts_hold_the_rows_of_all_files(tmp_path, kind):
    """Places, values and dropped nulls; columns that are not asked for stay out."""
    for name, rows in (("a", range(150)), ("b", range(150, 153))):
        path = tmp_path / f"{name}.{kind}"
        if kind == "jsonl":
            write_jsonl(path, [conversation(i) for i in rows])
            continue
        table = pa.Table.from_pylist([conversation(i) for i in rows])
        tools = table.schema.get_field_index("tools")
        table = table.set_column(tools, "tools", table["tools"].dictionary_encode())
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
    found = find_files([str(tmp_path / f"{name}.{kind}") for name in ("a", "b")])
    rows = list(all_rows(found, COLUMNS))
    assert rows == unfolded(all_parts(found, COLUMNS))
    assert [(0, 149), (1, 0)] == [row[:2] for row in rows[149:151]]
    expected = {"role": "user", "content": "u3", "name": "n"}
    assert [expected] * 3 == rows[3][2]["messages"]
    if kind != "jsonl":
        assert "name" not in rows[1][2]["messages"][0]
        assert {"messages"} == rows[1][2].keys()


def test_parts_of_long_rows_hold_few(tmp_path):
    """A part is about a megabyte, or one row: several are read ahead."""
    texts = ["a" * 600_000] * 5 + ["b"] * 3 + ["c" * 3_000_000]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    fmt = RowFormat(name="text", keys={"text_key": "text"})
    parts = list(all_parts(find_files([str(path)]), fmt))
    assert 9 == sum(part.num_rows for part in parts)
    assert all(part.num_rows == 1 or len(part.stream) < 1_500_000 for part in parts)
    assert texts == [row["text"] for _, _, row in unfolded(parts)]
    assert list(range(9)) == [row for _, row, _ in unfolded(parts)]


def test_parts_do_not_carry_the_dictionary_of_the_whole(tmp_path):
    """Categories of pandas keep one in parquet: each part would hold all of their texts."""
    texts = [f"{i} " * 2000 for i in range(320)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(texts).dictionary_encode()}), path)
    fmt = RowFormat(name="text", keys={"text_key": "text"})
    parts = list(all_parts(find_files([str(path)]), fmt))
    assert sum(len(pickle.dumps(part)) for part in parts) < 2 * sum(map(len, texts))
    assert texts == [row["text"] for _, _, row in unfolded(parts)]


def test_a_value_that_cannot_be_read_is_one_sentence(tmp_path):
    """Whoever reads the part says which file and columns hold it."""
    late = pa.array(
        [(datetime.date(9999, 12, 31) - datetime.date(1970, 1, 1)).days + 1], pa.date32()
    )
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": late}), path)
    fmt = RowFormat(name="text", keys={"text_key": "text"})
    (part,) = all_parts(find_files([str(path)]), fmt)
    with pytest.raises(DataError, match=r"a\.parquet holds a value in text that cannot be read"):
        part.rows()


def test_parts_of_lines_keep_rows_and_lines_apart(tmp_path):
    """Blank lines are lines but no rows, a first line may hold the byte order mark alone."""
    blank = b"\xef\xbb\xbf \n" + b"\r\n" * 1_200_000 + b"\n"
    rows = [b'{"text": "%d"}\n' % i for i in range(2500)]
    rows[1200] += b" \t\n"
    path = tmp_path / "a.jsonl"
    path.write_bytes(blank + b"".join(rows) + b'{"text": "%s"}' % (b"c" * 3_000_000) + b"\n\n")
    fmt = RowFormat(name="text", keys={"text_key": "text"})
    found = find_files([str(path)])
    parts = list(all_parts(found, fmt))
    assert [1000, 1000, 501] == [part.num_rows for part in parts]
    assert list(all_rows(found, fmt)) == unfolded(parts)
    assert (0, 2500) == unfolded(parts)[-1][:2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "is not valid JSON"),
        (b'{"text": "\xff"}', "is not UTF-8 text"),
        (b'["a"]', "is no JSON object"),
        (b'{"text": ' + b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_a_bad_line_is_told_by_its_number(tmp_path, line, words):
    """Whichever process reads the part, the line is the file's."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n' * 1500 + line + b"\n")
    fmt = RowFormat(name="text", keys={"text_key": "text"})
    first, last = all_parts(find_files([str(path)]), fmt)
    assert 1000 == len(first.rows())
    with pytest.raises(DataError, match=rf"a\.jsonl:3001 {words}"):
        pickle.loads(pickle.dumps(last)).rows()


def test_lines_of_a_file_that_changes_are_refused(tmp_path):
    """A file that is being written is not called damaged."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 10)
    found = find_files([str(path)])
    with open(path, "a") as stream:
        stream.write('{"text"')
    fmt = RowFormat(name="text", keys={"text_key": "text"})
    parts = all_parts(found, fmt)
    with pytest.raises(DataError, match="changed while it was read"):
        next(parts).rows()
    with pytest.raises(DataError, match="changed while it was read"):
        next(parts)
