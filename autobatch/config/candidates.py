"""A config as a candidate, a candidate as config keys."""

from __future__ import annotations

import dataclasses
from typing import Any

from autobatch.config.schema import TOGGLE_KEYS, Config
from autobatch.errors import ConfigError
from autobatch.records import Candidate, Toggles


def toggles_of(config: Config) -> Toggles:
    """Return the toggles that a config sets; `attn_implementation: auto` is made definite."""
    values = {}
    for key in TOGGLE_KEYS:
        section, name = key.split(".")
        values[name] = getattr(getattr(config, section), name)
    if values["attn_implementation"] == "auto":
        values["attn_implementation"] = default_attention(
            use_remove_padding=values["use_remove_padding"], device=config.trainer.device
        )
    return Toggles(**values)


def default_attention(*, use_remove_padding: bool, device: str) -> str:
    """Return the attention that `auto` stands for."""
    if not use_remove_padding:
        return "sdpa"
    return "varlen" if device == "cuda" else "reference"


def candidate_of(config: Config) -> Candidate:
    """Return the candidate that a config sets.

    Raises:
        ConfigError: if no size is set, or padded and padding-free settings are mixed.
    """
    data, model = config.data, config.model
    padding_free = (
        model.use_remove_padding,
        data.use_dynamic_bsz,
        data.max_token_len_per_gpu is not None,
    )
    padded = (
        not model.use_remove_padding,
        not data.use_dynamic_bsz,
        data.micro_batch_size_per_gpu is not None,
    )
    if all(padding_free) and not any(padded):
        return Candidate(
            toggles=toggles_of(config), max_token_len_per_gpu=data.max_token_len_per_gpu
        )
    if all(padded) and not any(padding_free):
        return Candidate(
            toggles=toggles_of(config), micro_batch_size_per_gpu=data.micro_batch_size_per_gpu
        )
    raise ConfigError(
        f"model.use_remove_padding={model.use_remove_padding}, "
        f"data.use_dynamic_bsz={data.use_dynamic_bsz}, "
        f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} and "
        f"data.micro_batch_size_per_gpu={data.micro_batch_size_per_gpu} do not go together; "
        "use true, true, N, null (padding-free) or false, false, null, N (padded), "
        "or let `autobatch tune` choose"
    )


def candidate_values(candidate: Candidate) -> dict[str, Any]:
    """Return the dotted keys that a candidate sets: all within TUNABLE_KEYS."""
    toggles = dataclasses.asdict(candidate.toggles)
    values: dict[str, Any] = {key: toggles[key.split(".")[1]] for key in TOGGLE_KEYS}
    values["data.use_dynamic_bsz"] = candidate.max_token_len_per_gpu is not None
    values["data.max_token_len_per_gpu"] = candidate.max_token_len_per_gpu
    values["data.micro_batch_size_per_gpu"] = candidate.micro_batch_size_per_gpu
    return values
