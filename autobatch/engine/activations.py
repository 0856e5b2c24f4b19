"""Gradient checkpointing: which activations are made again in the backward pass."""

from __future__ import annotations

from transformers import PreTrainedModel

from autobatch.errors import ConfigError

FORMS = ("none", "full")


def apply_gradient_checkpointing(model: PreTrainedModel, form: str) -> None:
    """Keep every activation (`none`) or only the input of each layer (`full`).

    Raises:
        ConfigError: for a form that this version does not have.
    """
    if form not in FORMS:
        raise ConfigError(
            f"gradient_checkpointing={form} is not in this version; use {' or '.join(FORMS)}"
        )
    if form == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
