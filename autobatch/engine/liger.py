"""Liger's layer kernels: norm, rotary embedding, gated MLP in Triton."""

from __future__ import annotations

from transformers import PreTrainedModel

from autobatch.errors import ConfigError


def apply_liger(model: PreTrainedModel) -> None:
    """Replace the layers of a model by Liger's; its loss stays ours.

    Liger also patches the classes of the model's module, so a process that did this once does it
    for every model: a probe child serves one toggle set.

    Raises:
        ConfigError: if Liger has no kernels for the model type.
    """
    from liger_kernel.transformers.monkey_patch import (
        MODEL_TYPE_TO_APPLY_LIGER_FN,
        _apply_liger_kernel_to_instance,
    )

    model_type = model.config.model_type
    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"model.use_liger=true: Liger has no kernels for model type {model_type}; "
            "use model.use_liger=false"
        )
    _apply_liger_kernel_to_instance(
        model=model,
        rope=True,
        rms_norm=True,
        swiglu=True,
        geglu=True,
        cross_entropy=False,
        fused_linear_cross_entropy=False,
    )
