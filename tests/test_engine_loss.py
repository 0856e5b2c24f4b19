"""Every loss kernel gives one loss and one gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from autobatch.engine.loss import LOSS_KERNELS, Head, chunk_tokens, token_loss, zero_loss

CPU_KERNELS = sorted(set(LOSS_KERNELS) - {"fused"})  # the fused one is Triton


def _problem(dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(37, 16, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(101, 16, generator=generator, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 101, (37,), generator=generator)
    return hidden, weight, labels


@pytest.mark.parametrize("kernel", CPU_KERNELS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk", [1, 10, 37, 64])
def test_kernels_equal_plain_cross_entropy(kernel: str, softcap: float | None, chunk: int) -> None:
    """Loss and both gradients, for chunks that divide the positions and that do not."""
    hidden, weight, labels = _problem()
    logits = hidden @ weight.T * 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = cross_entropy(logits, labels, reduction="sum")
    gradients = torch.autograd.grad(expected, (hidden, weight))
    head = Head(weight=weight, softcap=softcap, scale=0.5)
    loss = token_loss(hidden, labels, head, kernel=kernel, chunk=chunk)
    torch.testing.assert_close(loss, expected)
    for actual, wanted in zip(torch.autograd.grad(loss, (hidden, weight)), gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", CPU_KERNELS)
def test_bf16_states_give_a_float32_sum(kernel: str) -> None:
    """A sum over many tokens in bf16 would lose the small ones."""
    hidden, weight, labels = _problem(torch.bfloat16)
    loss = token_loss(hidden, labels, Head(weight=weight), kernel=kernel, chunk=10)
    assert torch.float32 == loss.dtype


def test_zero_loss_reaches_hidden_states_and_head() -> None:
    """A filler's backward pass runs, and adds nothing."""
    hidden, weight, _ = _problem()
    loss = zero_loss(hidden[:1], Head(weight=weight))
    loss.backward()
    assert 0.0 == float(loss)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert 0.0 == float(hidden.grad.abs().sum() + weight.grad.abs().sum())


@pytest.mark.parametrize(
    ("hidden_size", "vocab_size", "expected"),
    [(896, 151_936, 1024), (3584, 152_064, 1024), (576, 49_152, 1024), (64, 512, 64)],
)
def test_chunk_follows_hidden_size_within_a_gib_of_logits(
    hidden_size: int, vocab_size: int, expected: int
) -> None:
    """A power of two near H, and at most 1 GiB of float32 logits."""
    assert expected == chunk_tokens(hidden_size=hidden_size, vocab_size=vocab_size)
    assert expected * vocab_size * 4 <= 2**30
