"""Turn the conversation of a row into chat messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from autobatch.dataset.rows.formats import RowFormat, value_at

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "assistant": "assistant",
    "observation": "tool",
    "tool": "tool",
    "system": "system",
}
_EXAMPLES = 5  # rows named for each reason
_REFUSALS = 50  # words of a template kept apart: it may name something else in each row


class RowSkippedError(Exception):
    """A row cannot become a sample; the message is the reason it is counted under."""


class _UnknownTagError(RowSkippedError):
    """A turn is by nobody known; those of the other turns are counted with it."""


@dataclass(kw_only=True)
class Tally:
    """What was met while rows became samples; grows during one pass over the data."""

    num_rows: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    # reason -> (number over all files, file index, row index) of the first rows
    examples: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)  # the template's own words -> rows
    unknown_roles: Counter[str] = field(default_factory=Counter)
    dropped_parts: Counter[str] = field(default_factory=Counter)
    argument_kinds: Counter[str] = field(default_factory=Counter)
    num_labels_not_found: int = 0

    def skip(self, reason: str, place: tuple[int, int, int]) -> None:
        """Count one skipped row, and remember the first few by their places."""
        self.skipped[reason] += 1
        rows = self.examples.setdefault(reason, [])
        if len(rows) < _EXAMPLES:
            rows.append(place)

    def refuse(self, error: Exception) -> None:
        """Count what a template said when it refused a row."""
        words = f"{type(error).__name__}: {error}"[:200]
        if words in self.refusals or len(self.refusals) < _REFUSALS:
            self.refusals[words] += 1

    def add(self, other: Tally) -> None:
        """Count what was met in the rows that follow, too."""
        for name in (f.name for f in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif name == "examples":
                for reason, rows in theirs.items():
                    self.examples[reason] = (self.examples.get(reason, []) + rows)[:_EXAMPLES]
            elif isinstance(mine, int):
                setattr(self, name, mine + theirs)
            else:
                setattr(self, name, theirs if mine is None else mine)


def row_messages(row: Mapping[str, Any], fmt: RowFormat, tally: Tally) -> list[dict[str, Any]]:
    """Return the messages of a row, each with a text `content`.

    Raises:
        RowSkippedError: if the conversation is null or empty, or a side of it is no text.
    """
    if "messages_key" in fmt.keys:
        value = value_at(row, fmt.keys["messages_key"])
        messages = as_messages(value, "messages", tally)
    else:
        prompt, response = row_pair(row, fmt)
        messages = as_messages(prompt, "prompt", tally, role="user")
        messages += as_messages(response, "response", tally, role="assistant")
    if not messages:
        raise RowSkippedError("messages are empty")
    return messages


def row_pair(row: Mapping[str, Any], fmt: RowFormat) -> tuple[Any, Any]:
    """Return the prompt with its input, if any, and the response, unchecked."""
    prompt = value_at(row, fmt.keys["prompt_key"])
    if "input_key" in fmt.keys and isinstance(prompt, str):
        extra = value_at(row, fmt.keys["input_key"])
        if isinstance(extra, str) and extra:
            prompt = f"{prompt}\n{extra}"
    return prompt, value_at(row, fmt.keys["response_key"])


def as_text(value: Any, name: str) -> str:
    """Return a text value as it is.

    Raises:
        RowSkippedError: if it is null or not text; nothing is ever turned into `None` or `nan`.
    """
    if value is None:
        raise RowSkippedError(f"{name} is null")
    if not isinstance(value, str):
        raise RowSkippedError(f"{name} is not text")
    return value


def as_messages(
    value: Any, name: str, tally: Tally, *, role: str | None = None
) -> list[dict[str, Any]]:
    """Return messages from a list of turns, its JSON text, or (given `role`) plain text."""
    if role is not None and not isinstance(value, list):
        return [{"role": role, "content": as_text(value, name)}]
    if value is None:
        raise RowSkippedError(f"{name} are null")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowSkippedError(f"{name} are no list") from None
    if not isinstance(value, list):
        raise RowSkippedError(f"{name} are no list")
    try:
        return [_as_message(turn, tally) for turn in value]
    except _UnknownTagError:
        tags = (str(turn["from"]) for turn in value if isinstance(turn, Mapping) and "from" in turn)
        tally.unknown_roles.update(tag for tag in tags if tag not in _ROLES)
        raise


def _as_message(turn: Any, tally: Tally) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise RowSkippedError("a message is no object")
    if "role" in turn or "from" not in turn:
        message = dict(turn)
        role = message.get("role")
        if not isinstance(role, str):
            raise RowSkippedError("a message has no role")
        if role not in _ROLES:
            tally.unknown_roles[role] += 1  # a template may know it
        message["role"] = _ROLES.get(role, role)
    else:
        tag = str(turn["from"])
        if tag not in _ROLES:
            raise _UnknownTagError(f"role {tag!r} is unknown")
        message = {k: v for k, v in turn.items() if k not in ("from", "value")}
        message |= {"role": _ROLES[tag], "content": turn.get("value")}
    if message.get("tool_calls"):
        message["tool_calls"] = _as_calls(message["tool_calls"])
    content = message.get("content")
    if content is None:
        message["content"] = ""
    elif isinstance(content, list):
        message |= _join_parts(content, message, tally)
    elif not isinstance(content, str):
        raise RowSkippedError("response is not text")
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if not isinstance(function, Mapping):
            continue
        if not isinstance(function.get("name", ""), str):  # a template would print None
            raise RowSkippedError("the name of a tool call is not text")
        if function.get("arguments") is not None:
            kind = "text" if isinstance(function["arguments"], str) else "object"
            tally.argument_kinds[kind] += 1
    return message


def _as_calls(value: Any) -> list[Any]:
    """Return tool calls from a list or its JSON text; a template would walk over characters."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except (ValueError, RecursionError):
            raise RowSkippedError("tool_calls are no JSON") from None
    if not isinstance(value, list):
        raise RowSkippedError("tool_calls are no list")
    return value


def _join_parts(parts: list[Any], message: Mapping[str, Any], tally: Tally) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Any] = list(message.get("tool_calls") or ())
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = str(part.get("type", "text")) if isinstance(part, Mapping) else "null"
        if kind == "text":
            texts.append(_part_text(part, "text", "value"))
        elif kind in ("reasoning", "thinking"):
            reasoning.append(_part_text(part, "text", "value", kind))
        elif kind == "tool_call":
            calls.append(_part_call(part))
        else:
            tally.dropped_parts[kind] += 1
    joined: dict[str, Any] = {"content": "".join(texts)}
    if reasoning:
        joined["reasoning_content"] = "".join(reasoning)
    if calls:
        joined["tool_calls"] = calls
    return joined


def _part_text(part: Mapping[str, Any], *names: str) -> str:
    value = next((part[name] for name in names if part.get(name) is not None), "")
    if not isinstance(value, str):
        raise RowSkippedError("response is not text")
    return value


def _part_call(part: Mapping[str, Any]) -> Any:
    for name in ("tool_call", "value", "text"):
        if part.get(name) is not None:
            value = part[name]
            break
    else:
        return {k: v for k, v in part.items() if k != "type"}
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise RowSkippedError("a tool call is no JSON") from None
    return value


def row_tools(row: Mapping[str, Any], fmt: RowFormat) -> list[Any] | None:
    """Return the tools of a row; an empty list, empty text or null is None.

    Raises:
        RowSkippedError: if they are something else, or text that is no JSON.
    """
    value = value_at(row, fmt.keys["tools_key"]) if "tools_key" in fmt.keys else None
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, list):
            value = [json.loads(tool) if isinstance(tool, str) else tool for tool in value]
    except (ValueError, RecursionError):
        raise RowSkippedError("tools are no JSON") from None
    if value and not isinstance(value, list):
        raise RowSkippedError("tools are no list")
    return value or None
