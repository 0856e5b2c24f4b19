"""Files and columns are read, or refused in one sentence."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autobatch.dataset.rows.files import count_rows, find_files, read_columns, read_rows
from autobatch.dataset.rows.formats import choose_format
from autobatch.errors import ConfigError, DataError
from tests.tiny import write_jsonl, write_parquet

QA = {"question": "q", "answer": "a"}
USER = {"role": "user", "content": "u"}
ASSISTANT = {"role": "assistant", "content": "a"}
VERL = {"prompt": [USER], "extra_info": {"question": "q", "answer": "a", "index": 1}}
SHAREGPT = {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}


def formatted(path, **options):
    """Return (name, keys) of the chosen format of one file."""
    chosen = choose_format(find_files([path]), **options)
    return chosen.name, chosen.keys


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER], **QA}, ("messages", {"messages_key": "messages"})),
        (SHAREGPT, ("conversations", {"messages_key": "conversations"})),
        (QA, ("question_answer", {"prompt_key": "question", "response_key": "answer"})),
        (
            {"instruction": "i", "input": "", "output": "o", "text": "t"},
            (
                "instruction_output",
                {"prompt_key": "instruction", "response_key": "output", "input_key": "input"},
            ),
        ),
        (
            {"prompt": "p", "completion": "c"},
            ("prompt_response", {"prompt_key": "prompt", "response_key": "completion"}),
        ),
        (
            {"prompt": [USER], "completion": [ASSISTANT]},
            ("prompt_response", {"prompt_key": "prompt", "response_key": "completion"}),
        ),
        ({"prompt": [USER, ASSISTANT]}, ("messages", {"messages_key": "prompt"})),
        (
            VERL,
            (
                "question_answer",
                {"prompt_key": "extra_info.question", "response_key": "extra_info.answer"},
            ),
        ),
        ({"text": "t", "input_ids": [1]}, ("text", {"text_key": "text"})),
        ({"input_ids": [1], "n": 1}, ("input_ids", {"input_ids_key": "input_ids"})),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_first_matching_format_wins(tmp_path, write, row, expected):
    """The columns name the format, in one fixed order, for parquet and jsonl alike."""
    file = write(tmp_path / "data", [row]) if write is write_parquet else None
    file = file or write(tmp_path / "data.jsonl", [row])
    assert expected == formatted(file)


@pytest.mark.parametrize("row", [QA, VERL, SHAREGPT, {"instruction": "i", "output": "o"}])
def test_chosen_keys_choose_the_same_format_again(tmp_path, row):
    """A profile's format and keys, given back, mean the same."""
    file = write_jsonl(tmp_path / "a.jsonl", [row])
    name, keys = formatted(file)
    assert (name, keys) == formatted(file, format=name, keys=keys)


def test_prompt_key_alone_finds_its_partner(tmp_path):
    """extra_info.question is answered by extra_info.answer (A04)."""
    file = write_parquet(tmp_path / "a.parquet", [VERL])
    assert formatted(file, keys={"prompt_key": "extra_info.question"}) == formatted(file)


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        (VERL, {"prompt_key": "question"}, "did you mean 'extra_info.question'"),
        (QA, {"prompt_key": "questoin", "response_key": "answer"}, "did you mean 'question'"),
        (SHAREGPT, {"prompt_key": "conversations"}, "is a list.*messages_key=conversations"),
        (VERL, {"text_key": "prompt"}, "is a list"),
        (VERL, {"text_key": "extra_info"}, "is a struct"),
        ({"a": "x", "b": "y"}, {"prompt_key": "a"}, "give response_key too"),
        ({"a": "x", "b": "y"}, {}, "of no known format: its columns are a, b"),
        ({"prompt": [USER]}, {}, "of no known format"),
    ],
)
def test_wrong_columns_are_one_sentence(tmp_path, row, keys, message):
    """The error names the column, the columns there are, and the next move (A04)."""
    for file in (
        write_parquet(tmp_path / "a.parquet", [row]),
        write_jsonl(tmp_path / "a.jsonl", [row]),
    ):
        with pytest.raises(DataError, match=message) as caught:
            formatted(file, keys=keys)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"format": "massages"}, {"keys": {"promt_key": "a"}}])
def test_unknown_words_suggest_the_nearest(tmp_path, options):
    """A misspelled format or key name is refused with the right one."""
    file = write_jsonl(tmp_path / "a.jsonl", [QA])
    with pytest.raises(ConfigError, match=r"did you mean '(messages|prompt_key)'"):
        formatted(file, **options)


def test_shards_with_other_columns_are_refused(tmp_path):
    """Shards must agree in the columns that are read; the difference is named (A06 c)."""
    files = [
        write_parquet(tmp_path / "1.parquet", [QA]),
        write_parquet(tmp_path / "2.parquet", [{"question": "q", "response": "a"}]),
    ]
    with pytest.raises(DataError, match="only the first has answer, only the second response"):
        choose_format(find_files(files))


def test_unknown_feature_metadata_is_ignored(tmp_path):
    """Metadata of a data set library does not matter (A06 b)."""
    table = pa.Table.from_pylist([QA]).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": {"question": {"_type": "List"}}}})}
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert list(read_rows(*find_files([str(tmp_path / "a.parquet")]))) == [QA]


def test_encoded_strings_read_as_strings(tmp_path):
    """Dictionary-encoded and large strings are text (A06 d)."""
    table = pa.table(
        {
            "question": pa.array(["q"]).dictionary_encode(),
            "answer": pa.array(["a"], pa.large_string()),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    (file,) = find_files([str(tmp_path / "a.parquet")])
    assert read_columns(file) == {"question": "text", "answer": "text"}
    assert list(read_rows(file)) == [QA]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_no_rows_is_an_error(tmp_path, name):
    """A file without rows is named (A06 e)."""
    if name == "a.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / name)
    else:
        (tmp_path / name).write_text("[]" if name == "a.json" else "\n")
    with pytest.raises(DataError, match=f"{name} has no rows"):
        formatted(str(tmp_path / name))


def test_cut_parquet_is_damaged(tmp_path):
    """A file that lost its last bytes is damaged or incomplete (A06 f)."""
    path = tmp_path / "a.parquet"
    write_parquet(path, [QA])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="file damaged or incomplete"):
        formatted(str(path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2 is not valid JSON"),
        (b'{"text": "a"}\n[1]\n', r"a\.jsonl:2 is no JSON object"),
        (b'{"text": "\xff"}\n', r"a\.jsonl:1 is not UTF-8"),
        (b"\x00\x01\x02\n", r"a\.jsonl:1 is not valid JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    """A line that cannot be read is named by file and number."""
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        formatted(str(tmp_path / "a.jsonl"))


def test_json_list_is_read_like_lines(tmp_path):
    """A .json file may be one list, with a byte-order mark before it."""
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps([QA, QA]))
    assert list(read_rows(*find_files([str(tmp_path / "a.json")]))) == [QA, QA]


def test_folders_and_globs_name_files_in_order(tmp_path):
    """A folder gives its files by name, a glob the matching ones."""
    for name in ("b.jsonl", "a.jsonl"):
        write_jsonl(tmp_path / name, [QA])
    names = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert names == [f.path for f in find_files([str(tmp_path)])]
    assert names == [f.path for f in find_files([str(tmp_path / "*.jsonl")])]


def test_folder_of_twins_is_refused(tmp_path):
    """Parquet and JSON side by side may be the same rows twice."""
    write_jsonl(tmp_path / "a.jsonl", [QA])
    write_parquet(tmp_path / "a.parquet", [QA])
    with pytest.raises(DataError, match="mixes parquet and JSON"):
        find_files([str(tmp_path)])


def test_a_file_that_is_named_may_have_any_name(tmp_path):
    """config.json describes a folder, unless it is named itself."""
    write_jsonl(tmp_path / "config.json", [QA])
    write_jsonl(tmp_path / "rows.json", [QA])
    assert ["rows.json"] == [os.path.basename(f.path) for f in find_files([str(tmp_path)])]
    assert [QA] == list(read_rows(*find_files([str(tmp_path / "config.json")])))


def test_a_glob_reaches_into_folders(tmp_path):
    """`**` does; without a suffix it takes data files only. A folder alone does not."""
    for name in ("a/1.jsonl", "a/b/2.jsonl", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(QA) + "\n")
    names = [str(tmp_path / "a" / "1.jsonl"), str(tmp_path / "a" / "b" / "2.jsonl")]
    assert names == [f.path for f in find_files([f"{tmp_path}/**/*.jsonl"])]
    assert names == [f.path for f in find_files([f"{tmp_path}/**"])]
    with pytest.raises(DataError, match=r"/\*\*/\*\.jsonl"):
        find_files([str(tmp_path)])


def test_a_folder_of_several_splits_is_refused(tmp_path):
    """Test rows are not trained on because they lie beside."""
    for name in ("train-0-of-2.jsonl", "train-1-of-2.jsonl", "test.jsonl", "val.jsonl"):
        write_jsonl(tmp_path / name, [QA])
    with pytest.raises(DataError, match=r"the splits test, train, validation; .*/train-0-of-2"):
        find_files([str(tmp_path)])
    assert 2 == len(find_files([str(tmp_path / "train-*")]))


def pack_zstd(content):
    """Return content as one zstd frame."""
    return pa.Codec("zstd").compress(content, asbytes=True)


PACKERS = {".gz": gzip.compress, ".zst": pack_zstd, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_packed_files_are_read_by_their_first_bytes(tmp_path, suffix, named, kind):
    """Whatever the name says of the compression; several parts behind one another too."""
    text = {
        "jsonl": json.dumps(QA) * 2,
        "json": json.dumps([QA, QA]),
        "csv": "question,answer\nq,a\nq,a\n",
    }[kind].replace("}{", "}\n{")
    half = len(text) // 2
    path = tmp_path / f"a.{kind}{suffix if named else ''}"
    path.write_bytes(
        b"".join(PACKERS[suffix](part.encode()) for part in (text[:half], text[half:]))
    )
    assert [QA, QA] == list(read_rows(*find_files([str(path)])))


@pytest.mark.parametrize("suffix", PACKERS)
def test_cut_packed_files_are_damaged(tmp_path, suffix):
    """The rows before the cut are not taken for all."""
    rows = "".join(json.dumps({"text": os.urandom(64).hex()}) + "\n" for _ in range(500))
    packed = PACKERS[suffix](rows.encode())
    path = tmp_path / f"a.jsonl{suffix}"
    for content in (packed[:-20], packed[: len(packed) // 2]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"file damaged or incomplete: {path}"):
            list(read_rows(*find_files([str(path)])))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        ("a.jsonl", b"<!DOCTYPE html><html>", "is a web page, not the data"),
        ("a.jsonl", b"PK\x03\x04....", "is a zip archive; unpack it"),
        (
            "a.parquet.gz",
            gzip.compress(b"PAR1....", mtime=0),
            "is a parquet file inside gzip.*unpack it",
        ),
        ("a.parquet", b"", "file damaged or incomplete"),
        ("a.arrow", b"", "file damaged or incomplete"),
        ("a.arrow", b"ARROW1\0\0" + bytes(64), "file damaged or incomplete"),
        ("a.csv", b"question,answer\nq\n", r"a\.csv:2 has another number of values"),
        ("a.csv", b"question,answer\nq,\xff\n", "is not UTF-8"),
        ("a.json", b'[{"text": "a"}, {"text": ]', r"item 1 is not valid JSON \(Expecting value\)"),
        ("a.json", b'[{"text": "a"}', "item 1 is not valid JSON .the list does not end"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "item 1 is not valid JSON .no comma"),
        ("a.json", b'[{"text": "a"}] 7', "something follows the list"),
        ("a.json", b'{\n"data": [1]\n}', "holds one JSON object over several lines, not rows"),
        ("a.json", b'[{"text": "a"}, 7]', "item 1 is no JSON object"),
        ("a.json", b'[{"text": "\xff"}]', "is not UTF-8"),
        ("a.json", b"[" * 20000, "item 0 is not valid JSON"),
    ],
)
def test_files_that_are_not_what_they_seem_are_one_sentence(tmp_path, name, content, message):
    """Each says what it is and what to do."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_columns(*find_files([str(tmp_path / name)]))
    assert "\n" not in str(caught.value)


def test_a_long_json_list_is_streamed(tmp_path):
    """Items across the borders of what is read at once, in any script; reading stops early."""
    rows = [{"n": i, "text": '龙\\"x\U0001f409 ' * (i * 37 % 4000)} for i in range(300)]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1))
    (tmp_path / "b.json").write_text(json.dumps(rows)[:-1] + ", oops")
    (whole,), (broken,) = (find_files([str(tmp_path / name)]) for name in ("a.json", "b.json"))
    assert rows == list(read_rows(whole))
    assert rows[:200] == list(islice(read_rows(broken), 200))


# ---- what `datasets` writes --------------------------------------------------------


def save_arrow(path, rows, *, as_file=False):
    """Write rows as an Arrow stream, as `datasets` does, or as an Arrow file."""
    table = pa.Table.from_pylist(rows)
    new = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def save_to_disk(folder, num_shards):
    """Lay down the files of `Dataset.save_to_disk`."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{num_shards:05d}.arrow" for i in range(num_shards)]
    for i, name in enumerate(names):
        save_arrow(folder / name, [{"text": f"{i} {j}"} for j in range(3)])
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return [str(folder / name) for name in names]


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "stream"])
def test_arrow_rows_are_those_of_parquet(tmp_path, as_file):
    """Columns, counts, rows without merged nulls, chosen columns."""
    rows = [
        {"messages": [{"role": "user", "content": "x"}], "extra": {"a": i, "b": None}, "n": i}
        for i in range(5)
    ] + [{"messages": [], "extra": {"b": "c"}, "n": 5}]
    save_arrow(tmp_path / "a.arrow", rows, as_file=as_file)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (arrow,), (parquet,) = (find_files([str(tmp_path / n)]) for n in ("a.arrow", "a.parquet"))
    assert read_columns(parquet) == read_columns(arrow)
    assert list(read_rows(parquet)) == list(read_rows(arrow))
    assert [{"n": i} for i in range(6)] == list(read_rows(arrow, ["n"]))
    assert [{"a": 0}, {"b": "c"}] == [row["extra"] for row in read_rows(arrow, ["extra.a"])][::5]
    assert (6 if as_file else None) == count_rows(arrow)


@pytest.mark.parametrize("as_file", [True, False], ids=["file", "stream"])
def test_damaged_arrow_files_are_one_sentence(tmp_path, as_file):
    """Cut anywhere, or with a byte turned: refused or read, never a crash."""
    save_arrow(tmp_path / "a.arrow", [{"text": "abc" * 9}] * 9, as_file=as_file)
    whole = (tmp_path / "a.arrow").read_bytes()

    def read(content):
        (tmp_path / "b.arrow").write_bytes(content)
        try:
            return list(read_rows(*find_files([str(tmp_path / "b.arrow")])))
        except DataError as error:
            return str(error)

    for place in range(7, len(whole) - 8, 29):
        cut = read(whole[:place])
        assert "damaged or incomplete" in cut or not as_file
        turned = read(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        assert isinstance(turned, list) or "damaged or incomplete" in turned


def test_a_saved_data_set_is_its_shards(tmp_path):
    """A folder of `datasets`, with its splits: one alone or named."""
    shards = save_to_disk(tmp_path / "one", 2)
    assert shards == [f.path for f in find_files([str(tmp_path / "one")])]
    train = save_to_disk(tmp_path / "dict" / "train", 1)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert train == [f.path for f in find_files([str(tmp_path / "dict")])]
    test = save_to_disk(tmp_path / "dict" / "test", 1)
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    with pytest.raises(DataError, match=r"holds the splits test, train; name one, as .*dict/train"):
        find_files([str(tmp_path / "dict")])
    assert test == [f.path for f in find_files([str(tmp_path / "dict" / "test")])]


def test_a_saved_data_set_that_lost_a_shard_is_refused(tmp_path):
    """A missing shard, and a state that cannot be read."""
    save_to_disk(tmp_path / "one", 2)
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"lacks data-00001-of-00002\.arrow"):
        find_files([str(tmp_path / "one")])
    (tmp_path / "one" / "state.json").write_text("{")
    with pytest.raises(DataError, match="is no whole folder of `datasets`"):
        find_files([str(tmp_path / "one")])


# ---- while it is read ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, name):
    """Its rows would be of two files."""
    write = write_jsonl if name == "a.jsonl" else write_parquet
    path = tmp_path / name
    write(path, [QA] * 200)
    (file,) = find_files([str(path)])
    rows = read_rows(file)
    next(rows)
    (tmp_path / "new").write_bytes(path.read_bytes() + b"\n")
    os.replace(tmp_path / "new", path)
    with pytest.raises(DataError, match="changed while it was read; wait"):
        list(rows)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "a.jsonl.zst", "a.json.gz"])
def test_nothing_is_left_open(tmp_path, name):
    """After all rows, and after some of them."""
    path = tmp_path / name
    lines = (json.dumps(QA) + "\n").encode() * 100
    if name == "a.parquet":
        write_parquet(path, [QA] * 100)
    elif name == "a.arrow":
        save_arrow(path, [QA] * 100)
    else:
        path.write_bytes(PACKERS[path.suffix](lines) if path.suffix in PACKERS else lines)
    (file,) = find_files([str(path)])

    def is_open():
        links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return str(path) in [os.readlink(link) for link in links if os.path.lexists(link)]

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    some = read_rows(file)
    assert QA == next(some)
    some.close()
    read_columns(file)
    assert 100 == len(list(read_rows(file)))
    assert not is_open()


def test_one_large_row_group_is_streamed(tmp_path):
    """400 MiB of messages in one row group take what a few batches take (A06 a)."""
    kind = pa.list_(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))
    row = pa.array([[{"role": "user", "content": "abcdefgh" * 2**17}, ASSISTANT]], kind)
    table = pa.table({"messages": pa.chunked_array([row] * 400)})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="zstd", row_group_size=10**6, store_schema=False)
    assert 1 == pq.read_metadata(path).num_row_groups
    (file,) = find_files([str(path)])
    before, peak, num_rows = pa.total_allocated_bytes(), 0, 0
    for row in read_rows(file):
        num_rows += len(row["messages"][0]["content"]) == 2**20
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert 400 == num_rows
    assert peak <= 160 * 2**20


@pytest.mark.parametrize("name", ["none.parquet", "note.txt"])
def test_missing_and_foreign_files_are_refused(tmp_path, name):
    """A missing file, or one of another kind, is one sentence."""
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(DataError, match=r"does not exist|is no parquet, jsonl or json"):
        find_files([str(tmp_path / name)])
