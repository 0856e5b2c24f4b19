"""Fit a profile to the model that is to be trained: its positions, its embedding, its eyes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autobatch.dataset.lengths.advice import cost_of, cut_words
from autobatch.dataset.lengths.findings import advice_warnings, by_gravity
from autobatch.dataset.lengths.stats import two_groups
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.dataset.tokens.token_checks import count_beyond
from autobatch.dataset.tokens.truncation import kept_label_tokens
from autobatch.errors import AutobatchError, ModelError
from autobatch.model import read_model_spec, takes_media
from autobatch.records import LengthProfile, MaxLengthAdvice, MaxLengthOption, ProfileWarning
from autobatch.storage import user_path

_OF_ADVICE = ("two_groups", "padding_waste")  # ids of warnings that follow the advice


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What a profile needs to know of a model; None: unknown."""

    vocab_size: int | None = None
    positions: int | None = None
    takes_media: bool | None = None
    problem: str | None = None


def for_model(profile: LengthProfile, *, model: str | None, text_only: bool) -> LengthProfile:
    """Return the profile with advice and warnings for the model in a directory, if one is given.

    The advice is capped at the model's positions, and withheld where rows hold media that the
    model may take, unless it is told that only text is trained on. A directory without
    config.json tells nothing.
    """
    facts = _read(model)
    advice = profile.max_length
    if profile.media and not text_only and facts.takes_media is not False:
        advice = replace(advice, recommended=None, reason=_media_reason(profile.media))
    elif facts.positions is not None and (advice.recommended or 0) > facts.positions:
        advice = _capped(profile, facts.positions)
    warnings = [w for w in profile.warnings if w.id not in _OF_ADVICE]
    values, counts = np.array(profile.histogram, dtype=np.int64).T
    warnings += advice_warnings(advice, two_groups(values, counts))
    warnings += _model_warnings(profile, facts)
    return replace(profile, model=model, max_length=advice, warnings=by_gravity(warnings))


def _read(model: str | None) -> _Model:
    if model is None or not (Path(user_path(model)) / "config.json").is_file():
        return _Model()
    try:
        has_eyes = takes_media(model)
        spec = read_model_spec(model)
    except ModelError as error:
        return _Model(problem=str(error))
    return _Model(
        vocab_size=spec.vocab_size, positions=spec.max_position_embeddings, takes_media=has_eyes
    )


def _media_reason(media: tuple[str, ...]) -> str:
    return (
        f"None is advised: rows hold media ({', '.join(media)}), which the lengths here do not "
        "count, so any max_length cuts more than it says; --text-only advises for the text alone."
    )


def _capped(profile: LengthProfile, positions: int) -> MaxLengthAdvice:
    advice = profile.max_length
    option = _option(profile, positions)
    if option is None:
        reason = f"Every candidate is beyond the {positions} positions of the model."
        return replace(advice, recommended=None, reason=reason)
    others = [o for o in advice.curve if o.max_length != option.max_length]
    cut = cut_words(option, profile.num_samples, profile.num_label_tokens)
    return MaxLengthAdvice(
        recommended=option.max_length,
        reason=f"{cut}; the model takes {positions} tokens (max_position_embeddings), else "
        f"{advice.recommended} would be advised.",
        curve=tuple(sorted([*others, option], key=lambda o: o.max_length)),
    )


def _option(profile: LengthProfile, positions: int) -> MaxLengthOption | None:
    """Return the cost of all the model's positions; without a token cache of the widest known."""
    max_length = positions // 8 * 8 or positions
    known = [o for o in profile.max_length.curve if o.max_length <= positions]
    if known and known[-1].max_length == max_length:
        return known[-1]
    cache = _cache(profile)
    if cache is None:
        return known[-1] if known else None
    return cost_of(
        max_length,
        cache.lengths,
        label_tokens=cache.label_tokens,
        kept_labels=lambda indices, at: kept_label_tokens(
            cache, indices, max_length=at, truncation="right"
        ),
    )


def _cache(profile: LengthProfile) -> TokenCache | None:
    try:
        cache = None if profile.cache_dir is None else TokenCache.open(profile.cache_dir)
    except AutobatchError:
        return None
    return cache if cache is not None and cache.num_samples == profile.num_samples else None


def _model_warnings(profile: LengthProfile, model: _Model) -> Iterator[ProfileWarning]:
    if model.problem is not None:
        yield ProfileWarning(
            id="model_unread",
            seen=f"config.json of the model cannot be used: {model.problem}",
            cause="it is no complete config of a causal language model",
            next_move="correct it; until then neither positions nor vocabulary were checked",
        )
    if model.positions is not None and profile.length.max > model.positions:
        longer = sum(count for length, count in profile.histogram if length > model.positions)
        yield ProfileWarning(
            id="too_long_for_model",
            seen=f"{longer} of {profile.num_samples} rows are longer than the {model.positions} "
            f"positions of the model, the longest has {profile.length.max} tokens",
            cause="max_position_embeddings of its config.json",
            next_move=f"set data.max_length={model.positions} or less with data.truncation=drop, "
            "right or left, or take a model for longer texts",
        )
    tokens = profile.tokenizer_facts
    if model.vocab_size is None or tokens is None:
        return
    size = model.vocab_size
    if tokens.largest_data_token_id >= size:
        cache = _cache(profile)
        num_tokens, num_rows = (None, None) if cache is None else count_beyond(cache, size)
        counted = "rows have" if cache is None else f"{num_tokens} tokens in {num_rows} rows have"
        yield ProfileWarning(
            id="token_outside_embedding",
            seen=f"{counted} ids up to {tokens.largest_data_token_id}, and the model's embedding "
            f"has {size} rows",
            cause="the tokenizer or the ready-made ids belong to another model",
            next_move="use the tokenizer of this model, or grow its embedding; training would fail",
        )
    if tokens.pad_token_id is not None and tokens.pad_token_id >= size:
        yield ProfileWarning(
            id="pad_outside_embedding",
            seen=f"pad_token {tokens.pad_token} is id {tokens.pad_token_id}, and the model's "
            f"embedding has {size} rows",
            cause="the token was added and the embedding was not grown",
            next_move="name a token within the embedding, or grow it: other trainers fail at the "
            "first batch of two rows, here `tune` and `launch` refuse the tokenizer",
        )
    elif tokens.largest_token_id >= size > tokens.largest_data_token_id:
        yield ProfileWarning(
            id="tokenizer_outside_embedding",
            seen=f"the tokenizer has ids up to {tokens.largest_token_id}, and the model's "
            f"embedding has {size} rows; no row of the data holds such an id",
            cause="tokens were added and the embedding was not grown",
            next_move="use the tokenizer of this model, or grow its embedding: `tune` and "
            "`launch` refuse the pair",
        )
