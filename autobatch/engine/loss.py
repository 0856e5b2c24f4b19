"""The loss: summed cross-entropy of the labelled positions, by one of several kernels.

Legend: N labelled positions, H hidden size, V vocabulary. Kernels differ in memory and time
only. Each returns a sum, so that the caller can divide once by the label tokens of the whole
optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

# Most bytes of float32 logits that the chunked kernel makes at a time.
_MOST_CHUNK_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Head:
    """The output head: how hidden states become logits."""

    weight: torch.Tensor  # (V, H)
    bias: torch.Tensor | None = None  # (V,)
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    scale: float = 1.0  # logits are multiplied by it before the cap


def chunk_tokens(*, hidden_size: int, vocab_size: int) -> int:
    """Return how many positions the chunked kernel takes at a time.

    About H positions make each pass over the head weight (V x H) as much arithmetic as memory
    traffic needs; the float32 logits of a chunk stay within 1 GiB. A power of two.
    """
    by_traffic = 1 << (hidden_size - 1).bit_length()
    by_memory = 1 << max(0, (_MOST_CHUNK_BYTES // (4 * vocab_size)).bit_length() - 1)
    return max(1, min(by_traffic, by_memory))


def token_loss(
    hidden: torch.Tensor,  # (N, H), only the positions that predict a label
    labels: torch.Tensor,  # (N,) int64
    head: Head,
    *,
    kernel: str,
    chunk: int,
) -> torch.Tensor:
    """Return the float32 sum of the cross-entropies, () shaped.

    Without any labelled position the sum is a zero that still reaches every parameter, so that
    the collectives of the backward pass run on every rank.
    """
    return LOSS_KERNELS[kernel](hidden, labels, head, chunk)


def zero_loss(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """Return a zero whose gradient reaches the decoder and the head. `hidden` is (1, H)."""
    return _logits(hidden, head).float().sum() * 0.0


def _logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    logits = linear(hidden, head.weight, head.bias)
    if head.scale != 1.0:
        logits = logits * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return logits


def _fused_kernel(
    hidden: torch.Tensor, labels: torch.Tensor, head: Head, chunk: int
) -> torch.Tensor:
    """Liger's Triton kernel: gradients are made in the forward pass, a chunk at a time."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    num_labels, hidden_size = hidden.shape
    vocab_size = head.weight.shape[0]
    # Liger takes next_power_of_2(N / ceil(V / (const * H))) positions at a time.
    const = max(1, round(chunk * vocab_size / (num_labels * hidden_size)))
    if head.scale != 1.0:
        hidden = hidden * head.scale
    return liger_fused_linear_cross_entropy(
        hidden,
        head.weight,
        labels,
        bias=head.bias,
        reduction="sum",
        softcap=head.softcap,
        accum_dtype=torch.float32,
        chunk_mem_const=const,
    )


def _summed(hidden: torch.Tensor, labels: torch.Tensor, head: Head) -> torch.Tensor:
    return cross_entropy(_logits(hidden, head).float(), labels, reduction="sum")


def _logits_kernel(
    hidden: torch.Tensor, labels: torch.Tensor, head: Head, chunk: int
) -> torch.Tensor:
    """All logits at once, as most trainers do."""
    return _summed(hidden, labels, head)


def _chunked_kernel(
    hidden: torch.Tensor, labels: torch.Tensor, head: Head, chunk: int
) -> torch.Tensor:
    """A chunk of logits at a time, made again in the backward pass."""
    total = hidden.new_zeros((), dtype=torch.float32)
    for rows, targets in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        total = total + checkpoint(_summed, rows, targets, head, use_reentrant=False)
    return total


# `fused` needs CUDA and Liger.
LOSS_KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor, Head, int], torch.Tensor]] = {
    "logits": _logits_kernel,
    "chunked": _chunked_kernel,
    "fused": _fused_kernel,
}
