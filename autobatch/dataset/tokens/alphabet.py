"""The characters that two engines put into the same classes of a pattern.

`tokenizers` cuts words with Oniguruma, tiktoken with Rust's regex: other versions of Unicode,
other notions of a blank. Both are asked, for every character that data hold, how they cut it
from one of each class; what a pattern does to a text depends on the classes of its characters.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

_NEW, _SURE, _UNSURE = range(3)
_CONTEXTS = "aA1 .\n"  # one of each class that patterns tell apart


class Alphabet:
    """The characters that two engines put into the same classes of a pattern."""

    def __init__(self, backend: Any, pattern: str, *, unknown_bytes: frozenset[int]) -> None:
        """Know no character yet; `backend` is a `tokenizers.Tokenizer`."""
        self._words, self._normalizer = backend.pre_tokenizer, backend.normalizer
        self._pattern, self._unknown = pattern, unknown_bytes
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
        from tiktoken import Encoding

        known = [c for c in characters if self._is_stable(c)]
        probes = {
            c: [c + c, *(x + c for x in _CONTEXTS), *(c + x for x in _CONTEXTS)] for c in known
        }
        # a word that is a token comes out as that token, so one can see where words end
        parts = dict.fromkeys(chain(_CONTEXTS, known, chain.from_iterable(probes.values())))
        tokens = {bytes([i]): i for i in range(256)}
        token_of = {part: tokens.setdefault(part.encode(), len(tokens)) for part in parts}
        cutter = Encoding(
            "probes", pat_str=self._pattern, mergeable_ranks=tokens, special_tokens={}
        )
        self._states[list(map(ord, characters))] = _UNSURE
        for c, texts in probes.items():
            is_alike = all(
                cutter.encode_ordinary(text)
                == [token_of[text[i:j]] for _, (i, j) in self._words.pre_tokenize_str(text)]
                for text in texts
            )
            if is_alike:
                self._states[ord(c)] = _SURE

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
