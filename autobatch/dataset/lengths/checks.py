"""Look at a tokenizer for what spoils training, here or in another trainer."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from autobatch.dataset.tokens.token_checks import TokenCounts
from autobatch.dataset.tokens.tokenizer import Tokenizer
from autobatch.records import ProfileWarning, TokenizerFacts

# What comes back from decode(encode(text)) is compared for each.
_SCRIPTS = {
    "English": "Hello, world! It's 3.14 now; isn't it?",
    "Chinese": "北京是中国的首都，今天天气很好。",
    "Arabic": "مرحبا بالعالم، كيف حالك؟",
    "emoji": "Done 👍🏽 👨‍👩‍👧 🇨🇳",
    "code with tabs": "def f(a):\n\tif a:\n\t\treturn  a[0]  # two\r\n",
    "combining marks": "cafe\u0301 Viê\u0323t n\u0303 नि",
}


def tokenizer_facts(tokenizer: Tokenizer, largest_data_token_id: int) -> TokenizerFacts:
    """Return what a model must agree with."""
    fast = tokenizer.fast
    # the whole vocabulary takes a quarter of a second to list; without its added tokens it has
    # no gaps, or nearly none, and launch looks at every id
    num_base = fast.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    largest = max(num_base - 1, *fast.added_tokens_decoder)
    return TokenizerFacts(
        bos_token_id=fast.bos_token_id,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        pad_token=fast.pad_token,
        largest_token_id=largest,
        largest_data_token_id=largest_data_token_id,
    )


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that text outside the vocabulary becomes, None where there is none.

    It is the model's own: a byte-level tokenizer may name an unk_token it never produces.
    """
    model = tokenizer.fast.backend_tokenizer.model
    if hasattr(model, "unk_token"):
        return None if model.unk_token is None else model.token_to_id(model.unk_token)
    return tokenizer.fast.unk_token_id  # Unigram tells no name


def tokenizer_warnings(
    tokenizer: Tokenizer, counts: TokenCounts, *, format: str, num_samples: int, num_trainable: int
) -> Iterator[ProfileWarning]:
    """Yield what is wrong with a tokenizer for rows of a format, by its facts and the ids."""
    yield from _eos_warnings(tokenizer, counts, format, num_trainable)
    if counts.num_unknown:
        yield ProfileWarning(
            id="unknown_tokens",
            seen=f"{counts.num_unknown} tokens in {counts.num_rows_unknown} of {num_samples} rows "
            "are the unknown token: their text is lost",
            cause="the vocabulary lacks characters of this data",
            next_move="take a tokenizer that knows them (byte-level or with byte fallback), "
            "or clean the rows",
        )
    yield from _bos_warnings(tokenizer, counts, format, num_samples)
    yield from _round_trip_warnings(tokenizer, format)
    yield from _pad_warnings(tokenizer)
    pairs = ("question_answer", "instruction_output", "prompt_response")
    if tokenizer.template_hash is None and format in pairs:
        yield ProfileWarning(
            id="no_chat_template",
            seen="the tokenizer has no chat template, so rows are prompt, response and EOS",
            cause="it belongs to a base model",
            next_move="nothing, if the model shall complete text; for chat add "
            "chat_template.jinja to its folder, or take the instruct model's by --tokenizer",
        )


def _eos_warnings(
    tokenizer: Tokenizer, counts: TokenCounts, format: str, num_trainable: int
) -> Iterator[ProfileWarning]:
    end = tokenizer.end_marker
    if tokenizer.eos_id is None:
        is_chat = tokenizer.template_hash is not None and format not in ("text", "input_ids")
        yield ProfileWarning(
            id="no_eos",
            seen="the tokenizer names no eos_token, so "
            + ("nothing tells generation where to stop" if is_chat else "rows end without one"),
            cause="eos_token is missing in tokenizer_config.json",
            next_move="set eos_token there, or the model never learns to stop",
        )
    elif counts.num_rows_without_eos:
        eos = tokenizer.fast.eos_token
        num_rows = counts.num_rows_without_eos
        if format == "input_ids":
            cause = "labels of the end were masked, often because pad and EOS are one token"
            next_move = "mask labels by position, not by token id, and write the rows again"
        elif end and eos not in end:
            cause = f"the chat template ends a turn with {end}, eos_token is {eos}"
            next_move = (
                f"set eos_token to {end.strip()}, or add it to eos_token_id of "
                "generation_config.json, or generation runs on past the answer"
            )
        else:
            cause = "the chat template prints no end after some assistant turns"
            next_move = "correct chat_template, or the model never learns to stop"
        yield ProfileWarning(
            id="eos_not_in_labels",
            seen=f"{num_rows} of {num_trainable} rows with labels have no {eos} (eos_token) "
            "among them",
            cause=cause,
            next_move=next_move,
        )


def _bos_warnings(
    tokenizer: Tokenizer, counts: TokenCounts, format: str, num_samples: int
) -> Iterator[ProfileWarning]:
    bos, bos_id = tokenizer.fast.bos_token, tokenizer.fast.bos_token_id
    if bos_id is None:
        return
    if counts.num_rows_two_bos:
        yield ProfileWarning(
            id="bos_doubled",
            seen=f"{counts.num_rows_two_bos} of {num_samples} rows begin with {bos} "
            "(bos_token) twice",
            cause="the text begins with it already, and the tokenizer adds it again",
            next_move=f"take {bos} out of the text, or out of the post-processor of the tokenizer",
        )
    plain = tokenizer.fast.backend_tokenizer.encode("a", add_special_tokens=True).ids
    is_rendered = tokenizer.template_hash is not None and format not in ("text", "input_ids")
    if plain[:1] != [bos_id] or not is_rendered:
        return
    if counts.num_rows_without_bos:
        yield ProfileWarning(
            id="bos_missing",
            seen=f"{counts.num_rows_without_bos} of {num_samples} rows begin without {bos} "
            "(bos_token), which the tokenizer puts before plain text",
            cause="the chat template does not print it",
            next_move="write {{ bos_token }} at the start of chat_template, if the model was "
            "trained with it",
        )
    elif not counts.num_rows_two_bos:
        yield ProfileWarning(
            id="bos_doubled_elsewhere",
            seen=f"the chat template prints {bos} (bos_token), and the tokenizer adds another to "
            "text; the rows here have one",
            cause="both places were meant to add it",
            next_move="nothing here; in other trainers tokenize rendered text with "
            "add_special_tokens=False",
        )


def _pad_warnings(tokenizer: Tokenizer) -> Iterator[ProfileWarning]:
    fast = tokenizer.fast
    if fast.pad_token_id is None:
        yield ProfileWarning(
            id="pad_missing",
            seen="the tokenizer names no pad_token",
            cause="the model was trained without padding",
            next_move="nothing here, padding is by position; other trainers set it to EOS and may "
            "then mask every EOS: name a token of its own there",
        )
    elif fast.pad_token_id == fast.eos_token_id:
        yield ProfileWarning(
            id="pad_is_eos",
            seen=f"pad_token and eos_token are both {fast.pad_token}",
            cause="the tokenizer names no token of its own for padding",
            next_move="nothing here, labels are masked by position; where a trainer masks them by "
            "id every EOS is lost and the model never stops: name another pad_token there",
        )


def _round_trip_warnings(tokenizer: Tokenizer, format: str) -> Iterator[ProfileWarning]:
    if format == "input_ids":
        return  # no text is tokenized
    failing = [name for name, text in _SCRIPTS.items() if not _comes_back(tokenizer, text)]
    if failing:
        yield ProfileWarning(
            id="round_trip",
            seen=f"decode(encode(text)) gives another text for {', '.join(failing)}",
            cause="the tokenizer normalizes text or lacks characters of these",
            next_move="look at decoded rows if your data holds any, and take another tokenizer "
            "where the difference matters",
        )


def _comes_back(tokenizer: Tokenizer, text: str) -> bool:
    """Return whether a text survives; another spelling of the same characters does (NFC)."""
    backend = tokenizer.fast.backend_tokenizer
    ids = backend.encode(text, add_special_tokens=False).ids
    decoded = backend.decode(ids, skip_special_tokens=False)
    return unicodedata.normalize("NFC", decoded) == unicodedata.normalize("NFC", text)
