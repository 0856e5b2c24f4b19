"""Products in bfloat16 on processors that have no instruction for them.

Below AVX-512 torch's bfloat16 kernels are scalar: a step of SmolLM2-135M with 2 x 256 tokens took
126 s on two cores with AVX2, and in float32 4 s (torch 2.13, 2026-12-01). Computing each product
of bfloat16 numbers in float32 and rounding it once is what the instruction does, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# The operators that were slow. Attention's forward pass is not: it has a float32 product inside.
PRODUCT_OPS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    }
)


class Float32Products(TorchDispatchMode):
    """Compute products of bfloat16 tensors in float32 while entered; results are bfloat16.

    To be entered before a memory account: the copies in float32 are temporaries of a kernel.
    """

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # DTensor unwraps itself, its local operators come one by one
        if func not in PRODUCT_OPS or args[0].dtype != torch.bfloat16:
            return func(*args, **kwargs)
        result = func(
            *(_cast(a, torch.float32) for a in args),
            **{name: _cast(a, torch.float32) for name, a in kwargs.items()},
        )
        if isinstance(result, tuple):
            return tuple(_cast(part, torch.bfloat16) for part in result)
        return _cast(result, torch.bfloat16)


@contextmanager
def usable_products() -> Iterator[None]:
    """Compute as `Float32Products` inside, where this processor needs it."""
    is_native = "AVX512" in torch.backends.cpu.get_cpu_capability()
    with nullcontext() if is_native else Float32Products():
        yield


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    is_tensor = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.to(dtype) if is_tensor else argument
