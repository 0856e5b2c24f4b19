"""Name the columns that hold the conversation of a row."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from autobatch.dataset.rows.files import SAMPLED_ROWS, DataFile, count_rows, read_columns, read_rows
from autobatch.errors import ConfigError, DataError

# Pairs of prompt and response columns, in order of preference.
_PAIRS = (
    ("question_answer", "question", "answer"),
    ("instruction_output", "instruction", "output"),
    ("prompt_response", "prompt", "response"),
    ("prompt_response", "prompt", "completion"),
    ("question_answer", "extra_info.question", "extra_info.answer"),
)
FORMATS = (
    *("messages", "conversations", "question_answer", "instruction_output", "prompt_response"),
    *("text", "input_ids"),
)
_TOKEN_KEYS = {"input_ids_key": "input_ids", "labels_key": "labels", "loss_mask_key": "loss_mask"}
KEY_NAMES = (
    *("prompt_key", "response_key", "messages_key", "text_key", "tools_key", "input_key"),
    *_TOKEN_KEYS,
)

_FIRST_KEYS = ("messages_key", "text_key", "input_ids_key")


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Which columns of a row hold what."""

    name: str  # one of FORMATS
    keys: dict[str, str]  # key name -> dotted column path

    @property
    def columns(self) -> tuple[str, ...]:
        """The dotted paths that must be read."""
        return tuple(self.keys.values())


def value_at(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, None if any step is missing."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def choose_format(
    files: Sequence[DataFile], *, format: str = "auto", keys: Mapping[str, str | None] | None = None
) -> RowFormat:
    """Return the one format of all files: by the keys given, by name, or by the columns.

    Raises:
        ConfigError: if the format or a key name is unknown, or keys name two kinds of rows.
        DataError: if a column is missing or of the wrong kind, nothing matches, no file has
            rows, or files differ in the columns that are read.
    """
    given = _given_keys(format, keys)
    seen = [(file, columns) for file in files if (columns := _columns_with_rows(file))]
    if not seen:
        raise DataError(f"{files[0].path} has no rows; give a file with data")
    first, columns = seen[0]
    chosen = _from_keys(first, columns, format, given) if given else None
    if chosen is None:
        chosen = _from_columns(first, columns, format)
    chosen = _with_tools(chosen, columns, given)
    for file, others in seen[1:]:
        _check_same(chosen, first, columns, file, others)
    return chosen


def _columns_with_rows(file: DataFile) -> dict[str, str]:
    return {} if count_rows(file) == 0 else read_columns(file)


def _given_keys(format: str, keys: Mapping[str, str | None] | None) -> dict[str, str]:
    if format != "auto" and format not in FORMATS:
        raise ConfigError(
            f"data format {format!r} is unknown{_nearest(format, FORMATS)}; "
            f"use auto or one of {', '.join(FORMATS)}"
        )
    given = {name: path for name, path in (keys or {}).items() if path}
    for name in given:
        if name not in KEY_NAMES:
            raise ConfigError(
                f"data key {name!r} is unknown{_nearest(name, KEY_NAMES)}; "
                f"use one of {', '.join(KEY_NAMES)}"
            )
    pair = "prompt_key" if "prompt_key" in given else "response_key"
    firsts = [name for name in given if name in (pair, *_FIRST_KEYS)]
    if len(firsts) > 1:
        raise ConfigError(
            f"{' and '.join(firsts)} are given, and each tells by itself what a row is; give one"
        )
    return given


def _from_keys(
    file: DataFile, columns: Mapping[str, str], format: str, given: dict[str, str]
) -> RowFormat | None:
    for name, path in given.items():
        _check_column(file, columns, name, path)
    if "input_ids_key" in given:
        return RowFormat(name="input_ids", keys=given)
    if "messages_key" in given:
        name = "conversations" if format == "conversations" else "messages"
        if format == "auto" and given["messages_key"] == "conversations":
            name = "conversations"
        return RowFormat(name=name, keys=given)
    if "text_key" in given:
        return RowFormat(name="text", keys=given)
    if "prompt_key" not in given and "response_key" not in given:
        return None
    prompt, response = _complete_pair(file, columns, given)
    name = next((n for n, p, r in _PAIRS if (p, r) == (prompt, response)), "prompt_response")
    if format in ("question_answer", "instruction_output", "prompt_response"):
        name = format
    result = {**given, "prompt_key": prompt, "response_key": response}
    if name == "instruction_output" and "input_key" not in given and "input" in columns:
        result["input_key"] = "input"
    return RowFormat(name=name, keys=result)


def _complete_pair(
    file: DataFile, columns: Mapping[str, str], given: Mapping[str, str]
) -> tuple[str, str]:
    prompt, response = given.get("prompt_key"), given.get("response_key")
    if prompt and response:
        return prompt, response
    known = prompt or response or ""
    parent, dot, leaf = known.rpartition(".")
    for _, one, other in _PAIRS[:4]:
        pair = (f"{parent}{dot}{one}", f"{parent}{dot}{other}")
        if leaf in (one, other) and pair[0] in columns and pair[1] in columns and known in pair:
            return pair
    missing = "response_key" if prompt else "prompt_key"
    raise DataError(
        f"{file.path}: {known!r} needs its partner; give {missing} too, one of {', '.join(columns)}"
    )


def _check_column(file: DataFile, columns: Mapping[str, str], name: str, path: str) -> None:
    kind = columns.get(path)
    if kind is None:
        raise DataError(
            f"{file.path} has no column {path!r}{_nearest(path, list(columns))}; "
            f"it has {', '.join(columns)}"
        )
    if name in ("prompt_key", "response_key", "text_key", "input_key"):
        # prompt and response may be messages; from/value pairs are a whole conversation
        allowed = name in ("prompt_key", "response_key") and kind == "turns"
        allowed = allowed and bool(_roles(file, columns, path))
        if kind in ("list", "struct", "turns") and not allowed:
            raise DataError(
                f"{file.path}: column {path!r} is a {'struct' if kind == 'struct' else 'list'}, "
                f"and {name} needs text; name a text column"
                + (f", or give messages_key={path}" if kind == "turns" else "")
            )
    if name == "messages_key" and kind in ("number", "binary", "struct"):
        raise DataError(f"{file.path}: column {path!r} is no list of messages; name another")
    if kind == "binary":
        raise DataError(f"{file.path}: column {path!r} holds bytes, not text; decode it first")


def _first_turns(file: DataFile, path: str) -> list[dict[str, Any]]:
    values = (value_at(row, path) for row in islice(read_rows(file, [path]), SAMPLED_ROWS))
    turns = (turn for value in values if isinstance(value, list) for turn in value)
    return [turn for turn in turns if isinstance(turn, dict)]


def _roles(file: DataFile, columns: Mapping[str, str], path: str) -> set[str]:
    turns = _first_turns(file, path) if columns.get(path) == "turns" else []
    return {turn["role"] for turn in turns if isinstance(turn.get("role"), str)}


def _from_columns(file: DataFile, columns: Mapping[str, str], format: str) -> RowFormat:
    found = next((f for f in _matches(file, columns) if format in ("auto", f.name)), None)
    if found is None:
        wanted = "is of no known format" if format == "auto" else f"is not of format {format}"
        raise DataError(
            f"{file.path} {wanted}: its columns are {', '.join(columns) or 'none'}; "
            "name them with messages_key, text_key, or prompt_key and response_key"
        )
    return found


def _matches(file: DataFile, columns: Mapping[str, str]) -> list[RowFormat]:
    found = []
    for name in ("messages", "conversations"):
        if columns.get(name) in ("turns", "list", "text"):
            found.append(RowFormat(name=name, keys={"messages_key": name}))
    for name, prompt, response in _PAIRS:
        if prompt in columns and response in columns:
            if columns[prompt] in ("list", "struct", "binary"):
                continue
            keys = {"prompt_key": prompt, "response_key": response}
            if name == "instruction_output" and "input" in columns:
                keys["input_key"] = "input"
            found.append(RowFormat(name=name, keys=keys))
        # a prompt of messages is a conversation only if someone answers in it
        elif response == "completion" and "assistant" in _roles(file, columns, prompt):
            found.append(RowFormat(name="messages", keys={"messages_key": prompt}))
    if columns.get("text") in ("text", "null"):
        found.append(RowFormat(name="text", keys={"text_key": "text"}))
    if columns.get("input_ids") == "list":
        keys = {key: path for key, path in _TOKEN_KEYS.items() if path in columns}
        found.append(RowFormat(name="input_ids", keys=keys))
    return found


def _with_tools(chosen: RowFormat, columns: Mapping[str, str], given: dict[str, str]) -> RowFormat:
    keys = dict(chosen.keys)
    if chosen.name not in ("text", "input_ids") and "tools" in columns:
        keys.setdefault("tools_key", "tools")
    if "tools_key" in given:
        keys["tools_key"] = given["tools_key"]
    return RowFormat(name=chosen.name, keys=keys)


def _check_same(
    chosen: RowFormat,
    first: DataFile,
    columns: Mapping[str, str],
    file: DataFile,
    others: Mapping[str, str],
) -> None:
    for key, path in chosen.keys.items():
        kinds = [columns.get(path), others.get(path)]
        optional = key == "tools_key" and not file.has_schema  # rows may leave the key out
        if optional or "null" in kinds or kinds[0] == kinds[1]:
            continue
        apart = (
            f"only the first has {', '.join(sorted(set(columns) - set(others)))}, only the "
            f"second {', '.join(sorted(set(others) - set(columns))) or 'nothing more'}"
        )
        if None not in kinds:
            apart = f"column {path!r} is {kinds[0]} in the first, {kinds[1]} in the second"
        raise DataError(
            f"{first.path} and {file.path} differ in their columns: {apart}; "
            "rename the columns or profile the files apart"
        )


def _nearest(word: str, choices: Sequence[str]) -> str:
    leaf = word.rpartition(".")[2]
    near = [c for c in choices if c.rpartition(".")[2] == leaf]
    near = near or difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""
