"""Each checkpointing form keeps what its name says, layer by layer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import config_for
from tiny_model import tiny_model

from autobatch.engine.build import build
from autobatch.engine.device import claim
from autobatch.engine.tensors import make_tensors, random_rows

LAYERS, TOKENS, HIDDEN, INTER, HEADS, KV = 4, 64, 64, 128, 4, 2


def held_bytes(model: Path, form: str, *, layers: int = LAYERS) -> int:
    """Return the bytes that the forward pass of the decoder leaves for the backward pass."""
    config = config_for(model, engine__strategy="single", model__gradient_checkpointing=form)
    with claim(config, memory_limit_bytes=2**32) as device:
        engine = build(config, device, random_init=True)
        batch = make_tensors(
            random_rows([TOKENS], vocab_size=512, generator=np.random.default_rng(0))
        )
        before = device.memory.current_bytes
        output = engine.module.hidden_states(batch)
        held = device.memory.current_bytes - before
        del output
    return held


@pytest.fixture(scope="module")
def per_layer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Bytes held by one layer: the difference of a model with one layer more."""
    folder = tmp_path_factory.mktemp("models")
    small = tiny_model(folder / "small", "llama", num_hidden_layers=2)
    large = tiny_model(folder / "large", "llama", num_hidden_layers=4)
    return {
        form: (held_bytes(large, form) - held_bytes(small, form)) / 2
        for form in ("none", "selective", "selective_matmul", "every_2", "full")
    }


ROW_BYTES = TOKENS * 4  # one float32 value a token


def test_full_keeps_the_input_of_a_layer(per_layer: dict[str, float]) -> None:
    """One hidden state."""
    assert HIDDEN * ROW_BYTES == per_layer["full"]


def test_selective_adds_what_attention_gave(per_layer: dict[str, float]) -> None:
    """Output of all heads, and its log-sum-exp per head."""
    attention = (HIDDEN + HEADS) * ROW_BYTES
    assert attention == pytest.approx(per_layer["selective"] - per_layer["full"], abs=512)


def test_selective_matmul_adds_every_matrix_product(per_layer: dict[str, float]) -> None:
    """q, k, v, o, gate, up, down."""
    products = (2 * HIDDEN + 2 * HIDDEN * KV // HEADS + 2 * INTER + HIDDEN) * ROW_BYTES
    assert products == pytest.approx(
        per_layer["selective_matmul"] - per_layer["selective"], abs=4 * 512
    )


def test_every_2_keeps_half_of_none(per_layer: dict[str, float]) -> None:
    """One layer whole, the next one as in full."""
    expected = (per_layer["none"] + per_layer["full"]) / 2
    assert expected == pytest.approx(per_layer["every_2"], rel=0.02)


def test_the_forms_are_ordered_by_memory(per_layer: dict[str, float]) -> None:
    """Less kept, more made again."""
    order = ("full", "selective", "selective_matmul", "none")
    held = [per_layer[form] for form in order]
    assert sorted(held) == held


def test_attention_ops_cover_the_cpu_kernel() -> None:
    """The list is by op: an op that torch renames would silently save nothing."""
    from autobatch.engine.activations import ATTENTION_OPS

    seen = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen.add(op)
            return op(*args, **(kwargs or {}))

    query = torch.randn(1, 2, 8, 16)
    with Watch():
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert seen & ATTENTION_OPS
