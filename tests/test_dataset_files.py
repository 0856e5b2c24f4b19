"""Files and columns are read, or refused in one sentence."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autobatch.dataset.files import find_files, read_columns, read_rows
from autobatch.dataset.formats import choose_format
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


@pytest.mark.parametrize("name", ["none.parquet", "note.txt"])
def test_missing_and_foreign_files_are_refused(tmp_path, name):
    """A missing file, or one of another kind, is one sentence."""
    (tmp_path / "note.txt").write_text("hello")
    with pytest.raises(DataError, match=r"does not exist|is no parquet, jsonl or json"):
        find_files([str(tmp_path / name)])
