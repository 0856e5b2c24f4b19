"""Whatever a data file holds: a profile that adds up, or one plain sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from tiny import train_tokenizer
from transformers import PreTrainedTokenizerFast

from autobatch.cli import main
from autobatch.dataset.tokens.cache import TokenCache

# AUTOBATCH_FUZZ=20 looks at twenty times as many examples, other ones each time.
_TIMES = int(os.environ.get("AUTOBATCH_FUZZ", "1"))
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% if m.reasoning_content is string %}{{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}"
    "{{ f.name }}{{ f.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# None of the texts below holds one of these, so no rendered text may.
NEVER_WRITTEN = ("None", "nan", "array(", "date", "Decimal", "<bytes>", "object")


def fuzzed(num_examples: int) -> Callable[[Any], Any]:
    """Set how many examples are tried; the same ones in every run."""
    return settings(
        max_examples=num_examples * _TIMES,
        deadline=None,
        derandomize=_TIMES == 1,
        database=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer"), chat_template=TEMPLATE))


def check(tokenizer: str, write: Callable[[Path], Any], name: str, *options: str) -> dict[str, Any]:
    """Profile one file as a user does; check the answer, and return the record, {} if refused."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / name
        write(path)
        patch.setenv("AUTOBATCH_CACHE", f"{folder}/cache")
        patch.setattr("tempfile.tempdir", folder)
        command = ["profile", str(path), "--tokenizer", tokenizer, "--out", f"{folder}/out"]
        result = CliRunner().invoke(main, [*command, "--no-pictures", "--json", *options])
        faults = [file.read_text() for file in Path(folder).glob("autobatch-fault-*")]
        assert not faults, faults[0]
        assert result.exit_code in (0, 1), result.stderr
        assert "Traceback" not in result.stderr
        if result.exit_code == 1:
            *progress, last = result.stderr.splitlines()
            assert last.startswith("autobatch: ")
            assert not any(line.startswith("autobatch: ") for line in progress)
            assert "autobatch: cannot use" not in last  # an answer of the system nobody foresaw
            assert "" == result.stdout
            return {}
        record: dict[str, Any] = json.loads(result.stdout)
        skipped = sum(record["skipped"].values())
        assert record["num_rows"] == record["num_samples"] + skipped
        assert record["num_samples"] == sum(count for _, count in record["histogram"])
        cache = TokenCache.open(record["cache_dir"], partial_ok=True)
        if record["sampled"] is None:
            assert record["num_samples"] == cache.num_samples
            assert record["num_tokens"] == len(cache.tokens)
        assert 0 < record["num_label_tokens"] <= record["num_tokens"]
        if record["data"]["format"] != "input_ids":
            text = PreTrainedTokenizerFast.from_pretrained(tokenizer).decode(cache.tokens)
            assert [] == [word for word in NEVER_WRITTEN if word in text]
        return record


# ---- Arrow tables --------------------------------------------------------------------

TEXTS = (
    *("", " ", "two plus", "北京", "\U0001f409", "\0", "<image>", "<|im_end|>", "a\nb", "x" * 300),
    *('[{"role": "user", "content": "a"}]', "[]", "{}", "null", "[1", "[1]", "7"),
)
ROLES = ("user", "assistant", "assistant", "system", "tool", "human", "gpt", "bing", "")
PARTS = ("text", "text", "image", "reasoning", "thinking", "tool_call", "odd", "")
POOLS = {"role": ROLES, "from": ROLES, "type": PARTS}
STRINGS = (pa.string(), pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()))
LEAVES = (
    *STRINGS,
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.large_string()),
    *(pa.null(), pa.bool_(), pa.int8(), pa.int64(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64()),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"), pa.duration("us")),
    *(pa.timestamp("s"), pa.timestamp("us", tz="Asia/Shanghai"), pa.timestamp("ns", tz="+08:00")),
    *(pa.decimal128(38, 2), pa.decimal256(76, 9)),
    *(pa.binary(), pa.large_binary(), pa.binary(3)),
    pa.dictionary(pa.int8(), pa.int64()),
)
FIELDS = (
    *("role", "content", "from", "value", "type", "text", "tool_calls", "function", "name"),
    *("arguments", "question", "answer", "reasoning_content", "a.b", "a b", "中文", ""),
)
WANTED = {
    name: names
    for names in (
        ("messages",),
        ("conversations",),
        ("question", "answer"),
        ("instruction", "input", "output"),
        ("prompt", "response"),
        ("prompt", "completion"),
        ("text",),
        ("input_ids", "labels"),
        ("input_ids", "loss_mask"),
        ("extra_info",),
        ("images", "messages", "tools"),
    )
    for name in names
}
SETS = tuple(dict.fromkeys(WANTED.values()))
OTHER_NAMES = ("a.b", "a b", "中文", "", "extra_info.question", "messages.role", "tools", "x" * 200)


def structs(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    """Return struct types."""
    fields = st.dictionaries(st.sampled_from(FIELDS), inner, min_size=1, max_size=3)
    return fields.map(lambda d: pa.struct(list(d.items())))


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    """Return list, struct and map types."""
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        structs(inner),
        inner.map(lambda kind: pa.map_(pa.string(), kind)),
    )


ANY_TYPE = st.recursive(st.sampled_from(LEAVES), nested, max_leaves=4)
TEXT_TYPE = st.sampled_from(STRINGS)


@st.composite
def turn_types(draw: st.DrawFn) -> pa.DataType:
    """Return the type of a conversation, sound or nearly."""
    role, content = draw(st.sampled_from((("role", "content"), ("from", "value"))))
    part = pa.struct([("type", pa.string()), ("text", draw(TEXT_TYPE))])
    fields = {
        role: draw(TEXT_TYPE),
        content: draw(st.one_of(TEXT_TYPE, st.just(pa.list_(part)), ANY_TYPE)),
    }
    if draw(st.booleans()):
        arguments = draw(st.one_of(TEXT_TYPE, structs(ANY_TYPE)))
        call = pa.struct([("name", pa.string()), ("arguments", arguments)])
        fields["tool_calls"] = pa.list_(pa.struct([("function", call)]))
    fields |= draw(st.dictionaries(st.sampled_from(FIELDS), ANY_TYPE, max_size=1))
    return draw(st.sampled_from((pa.list_, pa.list_, pa.large_list)))(
        pa.struct(list(fields.items()))
    )


def sound_type(name: str) -> st.SearchStrategy[pa.DataType]:
    """Return types that people give a column of this name."""
    if name in ("messages", "conversations"):
        return turn_types()
    if name in ("input_ids", "labels", "loss_mask"):
        return st.sampled_from((pa.list_(pa.int64()), pa.large_list(pa.int32())))
    if name == "images":
        return st.just(pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
    if name == "extra_info":
        return st.just(pa.struct([("question", pa.string()), ("answer", pa.large_string())]))
    if name in ("prompt", "completion", "response"):
        return st.one_of(TEXT_TYPE, turn_types())
    if name == "tools":
        return st.one_of(TEXT_TYPE, ANY_TYPE.map(pa.list_))
    return TEXT_TYPE


WHOLE = (0, 1, 2, 3, 5, 7, 9, -1, -100, 2**31, 2**62, -(2**63), 2**63 - 1)
NUMBERS = (0.0, 1.5, float("nan"), float("inf"), -1.0)


def array(rng: Random, kind: pa.DataType, size: int, name: str = "") -> pa.Array:
    """Return an array of any values of a type, nulls among them.

    Types are drawn by hypothesis, values from a seed: thousands of draws would take seconds.
    """
    t = pa.types
    if t.is_null(kind):
        return pa.nulls(size)
    missing = [rng.random() < 0.1 for _ in range(size)]
    if t.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        inner = [array(rng, field.type, size, field.name) for field in fields]
        return pa.StructArray.from_arrays(inner, fields=fields, mask=pa.array(missing, pa.bool_()))
    if t.is_fixed_size_list(kind):
        inner = array(rng, kind.value_type, size * kind.list_size, name)
        return pa.FixedSizeListArray.from_arrays(inner, type=kind)
    if t.is_list(kind) or t.is_large_list(kind) or t.is_map(kind):
        starts = [0]
        for _ in range(size):
            starts.append(starts[-1] + rng.randrange(4))
        given = [None if i < size and missing[i] else start for i, start in enumerate(starts)]
        if t.is_map(kind):
            keys = pa.array([f"k{i}" for i in range(starts[-1])], pa.string())
            items = array(rng, kind.item_type, starts[-1], name)
            return pa.MapArray.from_arrays(pa.array(given, pa.int32()), keys, items)
        made = pa.ListArray if t.is_list(kind) else pa.LargeListArray
        offsets = pa.array(given, pa.int32() if t.is_list(kind) else pa.int64())
        return made.from_arrays(offsets, array(rng, kind.value_type, starts[-1], name))
    if t.is_dictionary(kind):
        words = array(rng, kind.value_type, 3, name)
        places = [rng.choice((0, 1, 2, None)) for _ in range(size)]
        return pa.DictionaryArray.from_arrays(pa.array(places, kind.index_type), words)
    if not (t.is_temporal(kind) or t.is_integer(kind)):
        values = [None if gone else value(rng, kind, name) for gone in missing]
        return pa.array(values, kind)
    # times are whole numbers, of which many are no date that Python knows
    bits = kind.bit_width
    most = 2 ** (bits - 1) - 1
    numbers = [max(-most - 1, min(rng.choice(WHOLE), most)) for _ in range(size)]
    held = [None if gone else n for gone, n in zip(missing, numbers, strict=True)]
    return pa.array(held, {8: pa.int8(), 32: pa.int32(), 64: pa.int64()}[bits]).view(kind)


def value(rng: Random, kind: pa.DataType, name: str) -> Any:
    """Return a text, bytes, or a number that is no integer."""
    t = pa.types
    if t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return rng.choice(POOLS.get(name, TEXTS))
    if t.is_boolean(kind):
        return rng.random() < 0.5
    if t.is_floating(kind):
        return rng.choice(NUMBERS)
    if t.is_decimal(kind):
        return rng.randrange(-99, 99)
    return rng.randbytes(3)


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """Return tables with a known set of columns, or nearly, among others."""
    names = list(draw(st.sampled_from(SETS)))
    names += draw(st.lists(st.sampled_from((*OTHER_NAMES, *OTHER_NAMES, *WANTED)), max_size=2))
    size = draw(st.sampled_from((0, 1, 2, 5, 9, 9, 9, 60)))
    rng = Random(draw(st.integers(0, 2**32)))
    columns = []
    for name in names:
        is_sound = draw(st.sampled_from((True,) * 7 + (False,)))
        kind = draw(sound_type(name) if is_sound else ANY_TYPE)
        columns.append(array(rng, kind, size, name))
    return pa.Table.from_arrays(columns, names=names)


KEYS = ("prompt", "response", "messages", "text", "tools")


@st.composite
def key_options(draw: st.DrawFn, names: list[str]) -> list[str]:
    """Return options that name columns, often none."""
    paths = st.sampled_from((*names, "extra_info.answer", "messages.content", "no.such", "\0"))
    chosen = draw(st.dictionaries(st.sampled_from(KEYS), paths, max_size=2))
    return [f"--{key}-key={path}" for key, path in chosen.items()]


def write_arrow(table: pa.Table, kind: str, rows_per_group: int) -> Callable[[Path], None]:
    """Return a function that writes a table."""

    def write(path: Path) -> None:
        if kind == "parquet":
            pq.write_table(table, path, row_group_size=rows_per_group)
            return
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_per_group)

    return write


@fuzzed(60)
@given(
    data=st.data(), table=tables(), kind=st.sampled_from(("parquet", "parquet", "file", "stream"))
)
def test_any_table_is_profiled_or_refused(
    tokenizer: str, data: st.DataObject, table: pa.Table, kind: str
) -> None:
    """Nested, null, of any type, with strange names and several row groups."""
    options = data.draw(st.one_of(*[st.just([])] * 5, key_options(table.column_names)))
    if table.num_rows >= 60:
        options = [*options, "--sample", "50"]
    write = write_arrow(table, kind, data.draw(st.sampled_from((1, 2, 99))))
    try:
        record = check(tokenizer, write, "a.parquet" if kind == "parquet" else "a.arrow", *options)
    except pa.ArrowException:  # parquet has no such type
        assume(False)
    if record:
        assert table.num_rows == record["num_rows"]


# ---- rows of JSON --------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from((2**31, 2**64, 10**399, -0.0, 1.5, float("nan"), float("inf"), 1e300)),
    st.sampled_from(TEXTS),
    st.sampled_from(("\ud800", "a\udc00", "\ufeff", "\u2028")),
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    ),
    max_leaves=6,
)


def mostly(sound: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return sound values, and a few of any kind."""
    return st.one_of(sound, sound, sound, sound, ANY_JSON)


PART = st.fixed_dictionaries(
    {"type": mostly(st.sampled_from(PARTS))},
    optional={
        "text": mostly(st.sampled_from(TEXTS)),
        "value": ANY_JSON,
        "tool_call": ANY_JSON,
        "reasoning": ANY_JSON,
    },
)
CALL = st.fixed_dictionaries(
    {"name": mostly(st.just("f")), "arguments": mostly(st.one_of(st.just('{"x": 1}'), ANY_JSON))}
)
CONTENT = mostly(st.one_of(st.sampled_from(TEXTS), st.lists(PART, max_size=3)))
MESSAGE = st.fixed_dictionaries(
    {"role": mostly(st.sampled_from(ROLES)), "content": CONTENT},
    optional={
        "tool_calls": mostly(st.lists(st.one_of(CALL, st.fixed_dictionaries({"function": CALL})))),
        "reasoning_content": ANY_JSON,
        "name": ANY_JSON,
    },
)
TURN = st.fixed_dictionaries({"from": mostly(st.sampled_from(ROLES)), "value": CONTENT})
CHAT = st.lists(mostly(st.one_of(MESSAGE, MESSAGE, TURN)), max_size=3)
IDS = st.lists(mostly(st.integers(-1, 9)), max_size=4)


def sound_value(name: str) -> st.SearchStrategy[Any]:
    """Return values that people write under this name."""
    if name in ("messages", "conversations"):
        return st.one_of(CHAT, CHAT, CHAT.map(json.dumps))
    if name in ("input_ids", "labels", "loss_mask"):
        return IDS
    if name in ("prompt", "completion", "response"):
        return st.one_of(st.sampled_from(TEXTS), CHAT)
    if name == "tools":
        return st.one_of(st.lists(CALL, max_size=2), st.lists(CALL, max_size=2).map(json.dumps))
    if name == "extra_info":
        return st.fixed_dictionaries({"question": ANY_JSON, "answer": ANY_JSON})
    return st.sampled_from(TEXTS)


TALK = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "plus"}]
SOUND: dict[str, Any] = dict.fromkeys(WANTED, "two") | {
    "messages": TALK,
    "prompt": TALK,
    "images": ["a.png"],
    "tools": [],
    "conversations": [{"from": "human", "value": "two"}, {"from": "gpt", "value": "plus"}],
    "input_ids": [1, 2],
    "labels": [1, 2],
    "loss_mask": [0, 1],
    "extra_info": {"question": "two", "answer": "plus"},
}


@st.composite
def json_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return rows of one set of columns, each nearly sound."""
    names = draw(st.sampled_from(SETS))
    row = st.fixed_dictionaries({name: mostly(sound_value(name)) for name in names})
    others = st.dictionaries(st.sampled_from(OTHER_NAMES), ANY_JSON, max_size=1)
    rows = [draw(row) | draw(others) for _ in range(draw(st.integers(1, 4)))]
    is_left = draw(st.sampled_from((True, True, True, False)))
    return [{name: SOUND[name] for name in names}, *rows] if is_left else rows


def write_json(rows: list[Any], kind: str) -> Callable[[Path], None]:
    """Return a function that writes rows as lines, as one list, or as parquet."""

    def write(path: Path) -> None:
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif kind == "json":
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


@fuzzed(45)
@given(rows=json_rows(), kind=st.sampled_from(("jsonl", "jsonl", "json", "parquet")))
def test_any_rows_are_profiled_or_refused(tokenizer: str, rows: list[Any], kind: str) -> None:
    """Unknown roles, contents as parts, calls of every shape, values of wrong types."""
    try:
        record = check(tokenizer, write_json(rows, kind), f"a.{kind}")
    except (pa.ArrowException, OverflowError, UnicodeEncodeError):  # Arrow cannot hold them
        assume(False)
    if record:
        assert len(rows) == record["num_rows"]


# ---- bytes ---------------------------------------------------------------------------

LINE = b'{"question": "two", "answer": "plus"}'
PIECES = (
    *(LINE, LINE, LINE + b"\n", LINE + b"\n", LINE + b"\r\n", b"\n", b"\r", b" "),
    *(b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"\xff", b"\xed\xa0\x80", b"\x1a", b"\xe2\x80\xa8"),
    *(b"[", b"]", b"{", b"}", b",", b'"', b"null", b"NaN", b"-Infinity", b"7" * 400, b"7" * 5000),
    *(b"1e999", b'"\\ud800"', b'"\\u12', b"\\", b"[" * 2000, b'{"a":' * 2000, b"'", b"#", b"\t"),
    b'{"question": "\\ud83d", "answer": "\\udc09"}\n',
    b'{"question": 7, "answer": NaN}\n',
    b'{"question": "a", "question": "b", "answer": "c"}\n',
    b'{"question": "a", "answer": ' + b"7" * 400 + b"}\n",
    b'{"question": "a", "answer": "b", "c": ' + b"[" * 500 + b"]" * 500 + b"}\n",
    b"question,answer\n",
    b'"a\n",b\n',
)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Return bytes of pieces, cut short now and then."""
    whole = b"".join(draw(st.lists(st.sampled_from(PIECES), max_size=6)))
    if draw(st.booleans()):
        whole = LINE + b"\n" + whole
    return whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole


@fuzzed(60)
@given(
    content=contents(), suffix=st.sampled_from(("jsonl", "jsonl", "jsonl", "json", "csv", "tsv"))
)
def test_any_bytes_are_profiled_or_refused(tokenizer: str, content: bytes, suffix: str) -> None:
    """Lines cut short, byte-order marks, nulls, half characters, depth, endless numbers."""
    check(tokenizer, lambda path: path.write_bytes(content), f"a.{suffix}")


# ---- what was found so -----------------------------------------------------------------

TWO = json.dumps({"messages": TALK}) + "\n"
CALLING = {"role": "assistant", "content": "plus"}


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_two_columns_of_one_name_are_refused_where_they_are_read(tokenizer: str, kind: str) -> None:
    """A row would hold the last of them; another column may be there twice."""
    one, two = pa.array(["two"]), pa.array(["plus"])
    names = ["question", "answer", "other", "other"]
    sound = pa.Table.from_arrays([one, two, one, two], names=names)
    twice = pa.Table.from_arrays([one, two, one, two], names=["question", "answer"] * 2)
    name = "a.parquet" if kind == "parquet" else "a.arrow"
    assert 1 == check(tokenizer, write_arrow(sound, kind, 9), name)["num_samples"]
    assert {} == check(tokenizer, write_arrow(twice, kind, 9), name)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": ["user"], "content": "two"}, "a message has no role"),
        (CALLING | {"tool_calls": float("inf")}, "tool_calls are no list"),
        (CALLING | {"tool_calls": [], "content": [], "x": 1}, None),
        (CALLING | {"tool_calls": "f(x)"}, "tool_calls are no JSON"),
        (CALLING | {"tool_calls": '[{"name": "f", "arguments": {}}]'}, None),
        (CALLING | {"tool_calls": [{"name": None, "arguments": {}}]}, "the name of a tool call"),
    ],
    ids=str,
)
def test_odd_messages_skip_their_row(
    tokenizer: str, message: dict[str, Any], reason: str | None
) -> None:
    """A role that is a list, calls that are none, a call of nobody; calls as text are read."""
    rows = [{"messages": TALK}, {"messages": [TALK[0], message]}]
    skipped = check(tokenizer, write_json(rows, "jsonl"), "a.jsonl")["skipped"]
    assert ([] if reason is None else [1]) == list(skipped.values())
    assert reason is None or reason in next(iter(skipped))


def test_a_role_that_is_a_list_asks_for_no_format(tokenizer: str) -> None:
    """While columns are looked at."""
    rows = [{"prompt": TALK}, {"prompt": [{"role": ["user"], "content": "two"}]}, {"prompt": 7}]
    record = check(tokenizer, write_json(rows, "jsonl"), "a.jsonl")
    assert 1 == record["num_samples"]


def test_keys_of_two_kinds_of_rows_are_refused(tokenizer: str) -> None:
    """Whichever won, the other would be left unread in silence."""
    write = write_json([{"messages": TALK, "a": "two", "b": "plus"}], "jsonl")
    assert {} == check(tokenizer, write, "a.jsonl", "--messages-key=messages", "--prompt-key=a")
    assert {} == check(tokenizer, write, "a.jsonl", "--text-key=a", "--prompt-key=b")


@pytest.mark.parametrize("depth", [200, 700, 900])
@pytest.mark.parametrize("place", ["call", "tools", "content", "images", "other"])
def test_depth_skips_the_row_that_needs_it(tokenizer: str, depth: int, place: str) -> None:
    """Beyond 256 where it is read, and nowhere else."""
    deep = "[" * depth + "]" * depth
    chat = json.dumps(TALK)[:-2]
    line = {
        "call": f'{{"messages": {chat}, "tool_calls": [{{"name": "f", "arguments": {deep}}}]}}]}}',
        "tools": f'{{"messages": {chat}}}], "tools": [{{"name": "f", "p": {deep}}}]}}',
        "content": f'{{"messages": {chat}}}, {{"role": "user", "content": {deep}}}]}}',
        "images": f'{{"messages": {chat}}}], "images": {deep}}}',
        "other": f'{{"messages": {chat}}}], "other": {deep}}}',
    }[place]
    tools = TWO.replace("}\n", ', "tools": [], "images": []}\n')
    record = check(tokenizer, lambda path: path.write_text(f"{tools}{line}\n"), "a.jsonl")
    if depth > 256 and place not in ("images", "other"):
        assert {"nested too deeply": 1} == record["skipped"]


def test_a_line_separator_in_a_column_name_breaks_no_sentence(tokenizer: str) -> None:
    """Nor does an escape sequence move the cursor."""
    content = "a\u2028b\tc\x1b[2J\n1\t2\n"
    assert {} == check(tokenizer, lambda path: path.write_text(content), "a.tsv")


def test_arguments_as_an_arrow_map_are_an_object(tokenizer: str) -> None:
    """Not a list of pairs."""
    call = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.int64()))])
    turn = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))]
    )
    calls = [{"name": "f", "arguments": [("x", 1)]}]
    chat = [TALK[0], CALLING | {"tool_calls": calls}]
    table = pa.table({"messages": pa.array([chat], pa.list_(turn))})
    mapped = check(tokenizer, write_arrow(table, "parquet", 9), "a.parquet")
    calls = [{"name": "f", "arguments": {"x": 1}}]
    rows = [{"messages": [TALK[0], CALLING | {"tool_calls": calls}]}]
    plain = check(tokenizer, write_json(rows, "jsonl"), "a.jsonl")
    assert plain["num_tokens"] == mapped["num_tokens"]


@pytest.mark.parametrize(
    "value", [b"x", date(2026, 1, 1), Decimal(1)], ids=["bytes", "date", "decimal"]
)
def test_what_json_does_not_know_skips_its_row(tokenizer: str, value: Any) -> None:
    """transformers would print `<date>`."""
    chat = [TALK[0], CALLING | {"tool_calls": [{"name": "f", "arguments": {"x": value}}]}]
    rows = [{"messages": TALK}, {"messages": chat}]
    assert 1 == check(tokenizer, write_json(rows, "parquet"), "a.parquet")["num_samples"]
