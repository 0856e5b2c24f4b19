"""Products of bfloat16 tensors computed in float32 are as exact, and the account agrees."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402 - torch may be absent

from autobatch.engine.account import MemoryAccount  # noqa: E402
from autobatch.engine.products import PRODUCT_OPS, Float32Products  # noqa: E402

ROUNDING = 2**-8  # of bfloat16: half a unit in its eighth bit


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).bfloat16()


def _attention_gradient(*tensors: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.detach().requires_grad_() for t in tensors)
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.autograd.grad(out, q, torch.ones_like(out))[0]


PRODUCTS: list[tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = [
    (torch.mm, ((5, 96), (96, 7))),
    (lambda a, b: a @ b.t(), ((5, 96), (7, 96))),
    (torch.addmm, ((7,), (5, 96), (96, 7))),
    (torch.bmm, ((3, 5, 96), (3, 96, 7))),
    (torch.baddbmm, ((3, 5, 7), (3, 5, 96), (3, 96, 7))),
]


@pytest.mark.parametrize(("product", "shapes"), PRODUCTS)
def test_a_product_is_the_exact_one_rounded_once(
    product: Callable[..., torch.Tensor], shapes: tuple[tuple[int, ...], ...]
) -> None:
    """No element is further from the float64 product than bfloat16 rounding takes it."""
    tensors = [_random(*shape) for shape in shapes]
    exact = product(*(t.double() for t in tensors))
    with Float32Products():
        actual = product(*tensors)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.double(), exact, rtol=ROUNDING, atol=1e-5)


def test_attention_gives_the_gradient_of_the_native_kernel() -> None:
    """Its backward pass goes through float32 and comes back in bfloat16."""
    tensors = [_random(1, 2, 33, 16) for _ in range(3)]
    exact = _attention_gradient(*(t.double() for t in tensors))
    with Float32Products():
        actual = _attention_gradient(*tensors)
    assert actual.dtype == torch.bfloat16
    error = (actual.double() - exact).norm() / exact.norm()
    assert float(error) < 2e-2


def test_every_slow_operator_is_caught_and_no_other_dtype() -> None:
    """float32 products pass untouched, bit for bit."""
    assert len(PRODUCT_OPS) == 5
    a, b = _random(5, 96).float(), _random(96, 7).float()
    with Float32Products():
        actual = a @ b
    assert torch.equal(actual, a @ b)


def _peak(*modes: Float32Products) -> int:
    layer = torch.nn.Linear(64, 32, dtype=torch.bfloat16)
    for mode in modes:
        mode.__enter__()
    try:
        with MemoryAccount() as account:
            layer(_random(16, 64)).sum().backward()
        return account.peak_bytes
    finally:
        for mode in modes:
            mode.__exit__(None, None, None)


def test_the_account_does_not_see_the_copies_in_float32() -> None:
    """A limit found on one processor holds on another."""
    assert _peak(Float32Products()) == _peak()
