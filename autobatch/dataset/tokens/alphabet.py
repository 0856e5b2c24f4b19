"""The characters that two engines put into the same classes of a pattern.

`tokenizers` cuts words with Oniguruma, tiktoken with Rust's regex: other versions of Unicode,
other notions of a blank. Both are asked, for every character that data hold, how they cut it
from one of each class; what a pattern does to a text depends on the classes of its characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import chain
from typing import Any

_CONTEXTS = "aA1 .\n"  # one of each class that patterns tell apart


class Alphabet:
    """The characters that two engines put into the same classes of a pattern."""

    def __init__(self, backend: Any, pattern: str, *, unknown_bytes: frozenset[int]) -> None:
        """Ask about ASCII; `backend` is a `tokenizers.Tokenizer`, which drops unknown bytes."""
        self._words, self._normalizer = backend.pre_tokenizer, backend.normalizer
        self._pattern, self._unknown = pattern, unknown_bytes
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
        self._unsure.update(characters)
        self._unsure.difference_update(known)
        for c, texts in probes.items():
            is_alike = all(
                cutter.encode_ordinary(text)
                == [token_of[text[i:j]] for _, (i, j) in self._words.pre_tokenize_str(text)]
                for text in texts
            )
            (self._sure if is_alike else self._unsure).add(c)

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
