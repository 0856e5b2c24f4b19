"""Causal attention for packed rows, registered under names that transformers leaves alone.

Legend: B batch, H query heads, K key/value heads, T tokens of the micro-batch, L tokens of a
row, D head width. A packed micro-batch is one line of T tokens whose rows must not see each
other; a padded one is (B, L), padded on the right, where causal attention needs no mask: no
real token looks right.
"""

from __future__ import annotations

from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

# transformers treats names with "flash", "sdpa" or "flex" in them specially, so ours have none.
REGISTERED_NAME = "autobatch_rows"

# torch 2.11 takes fewer key/value heads as they are; later ones want to be told.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}

# cuDNN's kernel is left out: see `_attend_row`.
_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Attention forms that change the result and that this module does not compute.
_REFUSED_KWARGS = ("s_aux", "sinks")


def register_attention() -> str:
    """Make the attention of this module selectable in transformers; return its name."""
    AttentionInterface.register(REGISTERED_NAME, attend)
    return REGISTERED_NAME


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,  # (B, H, T, D)
    key: torch.Tensor,  # (B, K, T, D)
    value: torch.Tensor,  # (B, K, T, D)
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    row_lengths: tuple[int, ...] | None = None,
    cu_seqlens: torch.Tensor | None = None,  # (N + 1,) int32
    longest_row: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each row.

    A packed line is told either by `cu_seqlens` with an upper bound of its longest row (CUDA's
    varlen kernel, which takes key/value heads unexpanded) or by `row_lengths` (row by row, on any
    device); neither means a padded batch.
    Returns (B, T, H, D) and no weights, as transformers expects.

    Raises:
        NotImplementedError: for attention masks, dropout, attention sinks, or a softcap in the
            varlen kernel.
    """
    if (
        attention_mask is not None
        or dropout
        or any(kwargs.get(k) is not None for k in _REFUSED_KWARGS)
    ):
        raise NotImplementedError(
            f"{type(module).__name__} asks for a mask, dropout or attention sinks, which packed "
            "rows cannot have; use a model without them"
        )
    if cu_seqlens is not None:
        if softcap is not None:
            raise NotImplementedError(
                f"{type(module).__name__} caps its attention scores, which the varlen kernel "
                "cannot; use model.attn_implementation=reference"
            )
        return _attend_varlen(
            query, key, value, cu_seqlens, longest_row, scaling, sliding_window
        ), None
    if row_lengths is None:
        rows = [(query, key, value)]
    else:
        lengths = list(row_lengths)
        rows = list(
            zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        )
    outputs = [
        _attend_row(q, k, v, scaling=scaling, sliding_window=sliding_window, softcap=softcap)
        for q, k, v in rows
    ]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2), None


def _attend_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest_row: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Return (1, T, H, D). Inputs in float32 (adapters, norms) are brought to bfloat16."""
    dtype = query.dtype if query.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    q, k, v = (t.squeeze(0).transpose(0, 1).to(dtype) for t in (query, key, value))
    left = -1 if sliding_window is None else sliding_window - 1
    grouped = _GROUPED if q.shape[1] != k.shape[1] else {}
    output = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        longest_row,
        longest_row,
        scale=scaling,
        window_size=(left, 0),
        **grouped,
    )
    return output.unsqueeze(0)


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return (B, H, L, D). A window of W sees the token itself and W - 1 tokens before it."""
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    windowed = sliding_window is not None and sliding_window < length
    if softcap is None:
        # cuDNN's kernel is faster, but it plans anew for each shape (a tenth of a second and
        # more), and padded micro-batches have hundreds: 28k instead of 118k tokens/s on an H200.
        mask = _window_mask(length, sliding_window, query.device) if windowed else None
        with sdpa_kernel(_BACKENDS) if query.is_cuda else nullcontext():
            return scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=grouped,
            )
    if grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scale
    scores = softcap * torch.tanh(scores / softcap)
    mask = _window_mask(length, sliding_window if windowed else length, query.device)
    scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return (L, L) bool: True where a query may look."""
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return mask if window is None else mask.triu(1 - window)
