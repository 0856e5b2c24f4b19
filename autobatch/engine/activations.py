"""Gradient checkpointing: which activations are made again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.attention.varlen  # registers torch.ops.torch_attn._varlen_attn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

aten = torch.ops.aten

# Every attention that the engine can reach, by device and backend.
ATTENTION_OPS = frozenset(
    {
        torch.ops.torch_attn._varlen_attn.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
# A linear layer is `addmm` with a bias and `mm` without.
MATMUL_OPS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default})


def apply_gradient_checkpointing(model: PreTrainedModel, form: str) -> None:
    """Choose what the decoder layers keep for the backward pass.

    none: everything. full: the layer's input. every_2: as full, in every second layer.
    selective: the input, and what attention gave, which costs most to make again.
    selective_matmul: also what every matrix product gave, so that only cheap work is repeated.
    """
    if form == "none":
        return
    arguments: dict[str, Any] = {"use_reentrant": False}
    if form == "selective":
        arguments["context_fn"] = _keeping(ATTENTION_OPS)
    elif form == "selective_matmul":
        arguments["context_fn"] = _keeping(ATTENTION_OPS | MATMUL_OPS)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    if form == "every_2":
        for layer in model.get_decoder().layers[1::2]:
            layer.gradient_checkpointing = False


def _keeping(
    ops: frozenset[Any],
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: create_selective_checkpoint_contexts(policy)
