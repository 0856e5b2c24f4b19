"""Load a tokenizer directory without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from autobatch.dataset.tokens.bpe import Bpe, IdsOfTexts, make_bpe
from autobatch.dataset.tokens.samples import flatten
from autobatch.dataset.tokens.templates import QuickRender, quick_render
from autobatch.dataset.tokens.tokenizer_files import check_directory, first_line
from autobatch.errors import ModelError

SpecialIds = tuple[tuple[int, ...], tuple[int, ...]]  # ids before and after a text


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A loaded tokenizer with what its template prints around an assistant turn."""

    directory: str
    fast: Any  # transformers.PreTrainedTokenizerFast
    eos_id: int | None
    closes_with_eos: bool  # the post-processor itself ends every text with EOS
    template_hash: str | None  # None: no chat template
    header: str  # printed before every assistant turn
    prompt: str  # printed by add_generation_prompt; may go on after the header (`<think>`)
    end_marker: str  # printed after it, without trailing whitespace
    quick: QuickRender | None = None  # the template for plain messages, to be checked by rows
    bpe: Bpe | None = None  # tiktoken's ids, see `with_bpe`
    special_ids: SpecialIds | None = None  # with bpe: None if texts get different ones

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the conversation as the chat template prints it."""
        return self.fast.apply_chat_template(
            list(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        """Return one `tokenizers.Encoding` a text, uncut and without padding."""
        return self.fast.backend_tokenizer.encode_batch(
            list(texts), add_special_tokens=add_special_tokens
        )

    def encode_ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> IdsOfTexts:
        """Return ids int32 (T,) of all texts, uncut, and their lengths int64 (N,).

        It is faster than `encode`, which knows characters too.
        """
        if self.bpe is None or (add_special_tokens and self.special_ids is None):
            return self._encode_ids(texts, add_special_tokens=add_special_tokens)
        plainly = partial(self._encode_ids, add_special_tokens=False)
        ids, lengths = self.bpe.encode(texts, otherwise=plainly)
        if not add_special_tokens or self.special_ids in (None, ((), ())) or not len(lengths):
            return ids, lengths
        before, after = (np.array(some, dtype=np.int32) for some in self.special_ids)
        rows = np.split(ids, np.cumsum(lengths)[:-1])
        parts = [part for row in rows for part in (before, row, after)]
        return np.concatenate(parts or [ids]), lengths + len(before) + len(after)

    def _encode_ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> IdsOfTexts:
        encodings = self.fast.backend_tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        return flatten((encoding.ids for encoding in encodings), lengths), lengths

    def marker_ids(self, text: str) -> list[int] | None:
        """Return the ids of a text that begins with an added token, None if it does not.

        An added token is cut out of a text before anything else is done to it, whatever
        stands around it, unless it takes blanks along or asks for whole words.
        """
        ids = self.fast.backend_tokenizer.encode(text, add_special_tokens=False).ids if text else []
        added = self.fast.backend_tokenizer.get_added_tokens_decoder().get(ids[0]) if ids else None
        if added is None or added.lstrip or added.rstrip or added.single_word or added.normalized:
            return None
        return ids if text.startswith(added.content) else None


def with_bpe(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose `encode_ids` is several times as fast where that is surely right.

    It takes seconds: worth it for many rows.
    """
    backend = tokenizer.fast.backend_tokenizer
    try:
        return replace(tokenizer, bpe=make_bpe(backend), special_ids=_special_ids(backend))
    except Exception:  # a tokenizer.json of a kind unknown here: a short cut is not worth an error
        return tokenizer


def _special_ids(backend: Any) -> SpecialIds | None:
    """Return the ids before and after every text, None if texts differ in them."""
    found: set[SpecialIds] = set()
    for text in ("a", "b c", "c"):
        bare, whole = (tuple(backend.encode(text, add_special_tokens=s).ids) for s in (False, True))
        places = range(len(whole) - len(bare) + 1)
        found |= {
            (whole[:i], whole[i + len(bare) :]) for i in places if whole[i : i + len(bare)] == bare
        }
    return found.pop() if len(found) == 1 else None


def load_tokenizer(directory: str) -> Tokenizer:
    """Return the tokenizer of a local directory.

    Raises:
        ModelError: if a file is missing or damaged, or the chat template cannot be read.
    """
    folder = check_directory(directory)
    from transformers import PreTrainedTokenizerFast  # a second: not paid by cached profiles

    try:
        fast = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        # a tokenizer.json saved after training may still cut or pad every text
        fast.backend_tokenizer.no_truncation()
        fast.backend_tokenizer.no_padding()
        ending = fast.backend_tokenizer.encode("a", add_special_tokens=True).ids[-1:]
    except Exception as error:  # the Rust reader raises bare Exception
        raise ModelError(
            f"the tokenizer in {directory} cannot be read ({first_line(error)}); "
            "download or save it again"
        ) from error
    template = fast.chat_template
    header, prompt, end_marker = _learn_turn(fast) if template else ("", "", "")
    return Tokenizer(
        directory=directory,
        fast=fast,
        eos_id=fast.eos_token_id,
        closes_with_eos=fast.eos_token_id is not None and ending == [fast.eos_token_id],
        template_hash=_hash(template) if template else None,
        header=header,
        prompt=prompt,
        end_marker=end_marker,
        quick=quick_render(fast) if template else None,
    )


def _hash(template: Any) -> str:
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _learn_turn(fast: Any) -> tuple[str, str, str]:
    """Return the header, generation prompt and end marker of an assistant turn.

    All are empty where a small conversation cannot tell; spans are then found by prefixes.

    Raises:
        ModelError: if the template is no valid jinja, or fails whatever the conversation.
    """
    from jinja2.exceptions import TemplateError, TemplateSyntaxError

    user = {"role": "user", "content": "Question"}
    answer = "Zq7answer"
    chat = [user, {"role": "assistant", "content": answer}, user]
    try:
        asked = fast.apply_chat_template(chat[:1], tokenize=False)
        prompted = fast.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        last = fast.apply_chat_template(chat[:2], tokenize=False)
        earlier = fast.apply_chat_template(chat, tokenize=False)
    except TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template is no valid jinja ({first_line(error)}); correct chat_template"
        ) from error
    except (ArithmeticError, RecursionError, MemoryError) as error:
        raise ModelError(
            f"the chat template fails on one question and answer ({type(error).__name__}: "
            f"{first_line(error)}); correct chat_template"
        ) from error
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
        return "", "", ""
    if not all(text.startswith(asked) for text in (prompted, last, earlier)) or answer not in last:
        return "", "", ""
    # Thinking templates print more before a last turn, or in the prompt, than before an
    # earlier turn: the header is what all three begin with.
    prompt = prompted[len(asked) :]
    header = _common_start(_common_start(prompt, last[len(asked) :]), earlier[len(asked) :])
    return header, prompt, last[last.rindex(answer) + len(answer) :].rstrip()


def _common_start(one: str, other: str) -> str:
    length = min(len(one), len(other))
    return next((one[:i] for i in range(length) if one[i] != other[i]), one[:length])
