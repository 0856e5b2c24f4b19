"""The characters that two engines put into the same classes of a pattern.

`tokenizers` cuts words with Oniguruma, tiktoken with Rust's regex: other versions of Unicode,
other notions of a blank. What a pattern does to a text depends on the classes of its characters,
so both are asked about every character that data hold and every class that the pattern names.
To see how they cut some words would not do: o200k cuts each pair alike with U+0903 (a mark) and
with U+4E2D (a letter), but not ` .\u0903a` and ` .\u4e2da`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

_CLASS = re.compile(r"\\p\{\w+\}|\\[sS]")
_LOOKAHEAD, _NEVER = r"(?!\S)", r"[^\s\S]"


class Alphabet:
    """The characters that two engines put into the same classes of a pattern."""

    def __init__(self, backend: Any, pattern: str, *, unknown_bytes: frozenset[int]) -> None:
        """Ask about ASCII; `backend` is a `tokenizers.Tokenizer`, which drops unknown bytes."""
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
        self._sure: set[str] = set()
        self._unsure: set[str] = set()
        self.learn("".join(map(chr, range(128))))
        self._is_ascii_sure = not self._unsure

    def learn(self, text: str) -> None:
        """Ask about the characters of a text that are new."""
        if self._sure and text.isascii():
            return
        new = set(text) - self._sure - self._unsure
        if new:
            self._ask(sorted(new))

    def covers(self, text: str) -> bool:
        """Return whether a text of learned characters is cut and normalized alike."""
        if self._is_ascii_sure and text.isascii():
            return True
        if self._normalizer is not None and not unicodedata.is_normalized("NFC", text):
            return False
        return self._unsure.isdisjoint(text)

    def _ask(self, characters: Sequence[str]) -> None:
        text = "".join(c for c in characters if self._is_stable(c))
        # tiktoken drops what a pattern leaves out, but nothing is where each character matches
        # alone, whatever follows it
        sure = {c for c in text if self._matches_alone.encode_ordinary(c)}
        for remover, matcher in self._classes:
            outside = set(remover.normalize_str(text))
            inside = set(bytes(matcher.encode_ordinary(text)).decode())
            sure &= outside ^ inside
        self._sure |= sure
        self._unsure.update(set(characters) - sure)

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
