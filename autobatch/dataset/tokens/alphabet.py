"""The characters that two engines put into the same classes of a pattern.

`tokenizers` cuts words with Oniguruma, tiktoken with Rust's regex: other versions of Unicode,
other notions of a blank. What a pattern does to a text depends on the classes of its characters,
so both are asked about every character that data hold and every class that the pattern names.
To see how they cut some words would not do: o200k cuts each pair alike with U+0903 (a mark) and
with U+4E2D (a letter), but not ` .\u0903a` and ` .\u4e2da`.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

_NEW, _SURE, _UNSURE = range(3)
_CLASS = re.compile(r"\\p\{\w+\}|\\[sS]")
_LOOKAHEAD, _NEVER = r"(?!\S)", r"[^\s\S]"


class Alphabet:
    """The characters that two engines put into the same classes of a pattern."""

    def __init__(self, backend: Any, pattern: str, *, unknown_bytes: frozenset[int]) -> None:
        """Know no character yet; `backend` is a `tokenizers.Tokenizer`."""
        from tiktoken import Encoding
        from tokenizers import Regex
        from tokenizers.normalizers import Replace

        def matcher(pattern: str) -> Encoding:  # its ids are the bytes of all that matches
            tokens = {bytes([i]): i for i in range(256)}
            return Encoding("matcher", pat_str=pattern, mergeable_ranks=tokens, special_tokens={})

        self._normalizer, self._unknown = backend.normalizer, unknown_bytes
        self._classes = [(Replace(Regex(c), ""), matcher(c)) for c in set(_CLASS.findall(pattern))]
        self._matches_alone = matcher(pattern.replace(_LOOKAHEAD, _NEVER))
        self._caseless = [group.casefold() for group in re.findall(r"\(\?i:([^)]*)", pattern)]
        self._states = np.full(sys.maxunicode + 1, _NEW, dtype=np.uint8)  # by code point

    def covers(self, texts: Sequence[str]) -> np.ndarray:
        """Return bool (N,): the texts that are cut and normalized alike."""
        joined = "".join(texts).encode("utf-32-le", "surrogatepass")
        codes = np.frombuffer(joined, dtype="<u4")
        states = self._states[codes]
        is_new = states == _NEW
        if is_new.any():
            self._ask([chr(code) for code in np.unique(codes[is_new])])
            states = self._states[codes]
        ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
        is_covered = np.ones(len(texts), dtype=bool)
        is_covered[np.searchsorted(ends, np.flatnonzero(states == _UNSURE), side="right")] = False
        if self._normalizer is not None:
            is_covered &= np.fromiter(map(_is_normal, texts), bool, len(texts))
        return is_covered

    def _ask(self, characters: Sequence[str]) -> None:
        text = "".join(c for c in characters if self._is_stable(c))
        # tiktoken drops what a pattern leaves out, but nothing is where each character matches
        # alone, whatever follows it
        sure = {c for c in text if self._matches_alone.encode_ordinary(c)}
        for remover, matcher in self._classes:
            outside = set(remover.normalize_str(text))
            inside = set(bytes(matcher.encode_ordinary(text)).decode())
            sure &= outside ^ inside
        self._states[list(map(ord, characters))] = _UNSURE
        self._states[list(map(ord, sure))] = _SURE

    def _is_stable(self, c: str) -> bool:
        """Return whether every version of Unicode, in either engine, reads a character alike.

        It is assigned, so its normal form never changes, it is no other case of a letter whose
        case the pattern leaves open, and the vocabulary has all of its bytes.
        """
        if unicodedata.category(c) in ("Cn", "Cs", "Co") or not self._unknown.isdisjoint(
            c.encode()
        ):
            return False
        return c.isascii() or not any(c.casefold() in group for group in self._caseless)


def _is_normal(text: str) -> bool:
    return text.isascii() or unicodedata.is_normalized("NFC", text)
