"""Rules about the model directory against the data."""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.config import Config
from autobatch.preflight.rule import Finding, refuse, warn
from autobatch.records import ModelSpec


def check_model(
    config: Config,
    spec: ModelSpec,
    *,
    longest_row: int,
    largest_id: int | None,
    needs_weights: bool,
) -> Iterator[Finding]:
    """Look at weights, positions and vocabulary. `longest_row` is in tokens, after the cut."""
    if needs_weights and not spec.has_weights and config.model.init == "pretrained":
        yield refuse(
            "no_weights",
            f"{spec.path} holds no weights (*.safetensors); give a directory with weights, "
            "or model.init=random to train from random ones",
        )
    if spec.max_position_embeddings is not None and longest_row > spec.max_position_embeddings:
        yield refuse(
            "too_long_for_model",
            f"the longest row has {longest_row} tokens, the model takes "
            f"{spec.max_position_embeddings} (max_position_embeddings); use "
            f"data.max_length={spec.max_position_embeddings} with data.truncation=drop or right",
        )
    if largest_id is not None and largest_id >= spec.vocab_size:
        yield refuse(
            "token_outside_embedding",
            f"tokenizer or data have token id {largest_id}, the model's embedding has "
            f"{spec.vocab_size} rows; use the tokenizer of this model, or grow its embedding",
        )
    if config.model.revision is not None:
        yield warn(
            "revision_ignored",
            f"model.revision={config.model.revision} is ignored: {spec.path} is a local directory",
        )
