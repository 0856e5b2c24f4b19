"""Patterns that cut texts into words, as far as two engines surely read them alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CLASS = r"\\p\{(?:[LMNPSZ]|L[ultmo]|M[nce]|N[dlo])\}|\\[sSrnt]"
_SET = rf"\[\^?(?:{_CLASS}|[^\\\[\]^&~-])+\]"
_ATOM = rf"(?:{_SET}|{_CLASS}|[^\\\[\](){{}}.*+?|^$])(?:[?*+]|\{{\d+(?:,\d*)?\}})?"
# Engines differ in what a repeated group may leave empty, and in cases beyond ASCII.
_GROUP = r"\((?:\?:)?|\)\??|\(\?i:['a-zA-Z|\[\]]+\)\??"
# No lazy and no possessive repetition, no anchor, no lookahead but the one for a last blank.
_PLAIN_PATTERN = re.compile(rf"(?:(?:{_ATOM}|{_GROUP})(?![?*+{{])|\(\?!\\S\)|\|)+")


def plain_pattern(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    """Return the pattern that a tokenizer cuts words by, None if it may do otherwise.

    `pre_tokenizer` is the pre-tokenizer of a tokenizer.json: a pattern and byte-level characters.
    """
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None
    if len(steps) == 1 and steps[0]["use_regex"]:
        return _GPT2_PATTERN  # it stands in the source of `tokenizers`
    if len(steps) != 2 or steps[0]["type"] != "Split" or steps[1]["use_regex"]:
        return None
    if steps[0]["behavior"] != "Isolated" or steps[0]["invert"]:
        return None
    pattern = steps[0]["pattern"].get("Regex")
    return pattern if pattern and _is_plain_pattern(pattern) else None


def _is_plain_pattern(pattern: str) -> bool:
    """Return whether both engines read a pattern alike, and it matches no empty word."""
    if not _PLAIN_PATTERN.fullmatch(pattern):
        return False
    try:
        return re.match(re.sub(r"\\p\{\w+\}", "x", pattern), "") is None
    except (re.error, OverflowError):
        return False
