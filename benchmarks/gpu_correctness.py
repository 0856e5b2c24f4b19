"""How far the GPU's kernels are from plain float32 arithmetic: one row a comparison.

Each function returns the largest relative error of a comparison: |a - b| / max |b| for tensors.
Limits: attention and packed logits 2e-2, gradients of Liger and checkpointing forms 1e-2.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from autobatch.config import Config, load_config, resolve
from autobatch.engine.attention import attend
from autobatch.engine.build import Engine, build
from autobatch.engine.device import claim
from autobatch.engine.loss import Head, token_loss
from autobatch.engine.tensors import MicroBatchTensors, make_tensors, random_rows

LENGTHS = (700, 33, 512, 1, 129, 1024)
GIB = 2**30
MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 4,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected value."""
    scale = expected.float().abs().max().clamp_min(1e-12)
    return float((actual.float() - expected.float()).abs().max() / scale)


def attention_rows() -> Iterator[dict[str, Any]]:
    """Varlen attention, forward and backward, against float32 row by row."""
    for heads, kv, width, window in ((14, 2, 64, None), (28, 4, 128, None), (4, 1, 256, 512)):
        generator = torch.Generator("cuda").manual_seed(0)
        total = sum(LENGTHS)

        def random(n: int, generator=generator, total=total, width=width) -> torch.Tensor:
            return torch.randn(1, n, total, width, device="cuda", generator=generator)

        q, k, v = (t.bfloat16().requires_grad_() for t in (random(heads), random(kv), random(kv)))
        cu = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32, device="cuda")
        module = torch.nn.Module()
        out, _ = attend(
            module, q, k, v, None, sliding_window=window, cu_seqlens=cu, longest_row=max(LENGTHS)
        )
        weight = torch.randn_like(out)
        grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
        q32, k32, v32 = (t.detach().float().requires_grad_() for t in (q, k, v))
        reference, _ = attend(module, q32, k32, v32, None, sliding_window=window,
                              row_lengths=LENGTHS)  # fmt: skip
        expected = torch.autograd.grad((reference * weight.float()).sum(), (q32, k32, v32))
        yield {
            "what": f"varlen attention forward, {heads}/{kv} heads x {width}, window {window}",
            "error": relative_error(out, reference),
            "limit": 2e-2,
        }
        yield {
            "what": f"varlen attention backward, {heads}/{kv} heads x {width}, window {window}",
            "error": max(relative_error(a, b) for a, b in zip(grads, expected, strict=True)),
            "limit": 2e-2,
        }


def loss_rows() -> Iterator[dict[str, Any]]:
    """Loss kernels in bf16 against float32 logits, for small and large chunks."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(3000, 896, device="cuda", generator=generator).bfloat16()
    weight = (torch.randn(32000, 896, device="cuda", generator=generator) * 0.02).bfloat16()
    labels = torch.randint(0, 32000, (3000,), device="cuda", generator=generator)
    h32, w32 = hidden.float().requires_grad_(), weight.float().requires_grad_()
    expected = cross_entropy(h32 @ w32.T, labels, reduction="sum")
    expected_grads = torch.autograd.grad(expected, (h32, w32))
    for kernel in ("logits", "chunked", "fused"):
        for chunk in (256, 1024, 4096):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            loss = token_loss(h, labels, Head(weight=w), kernel=kernel, chunk=chunk)
            grads = torch.autograd.grad(loss, (h, w))
            yield {
                "what": f"{kernel} loss, chunk {chunk}: value",
                "error": relative_error(loss.detach(), expected.detach()),
                "limit": 1e-3,
            }
            yield {
                "what": f"{kernel} loss, chunk {chunk}: gradients",
                "error": max(
                    relative_error(a, b) for a, b in zip(grads, expected_grads, strict=True)
                ),
                "limit": 2e-2,
            }


def config_of(model_dir: Path, **values: Any) -> Config:
    """Return a CUDA config on one rank; keyword `a__b` sets key `a.b`."""
    settings = {
        "model.path": str(model_dir),
        "trainer.device": "cuda",
        "engine.strategy": "single",
        "model.init": "random",
        "data.max_length": 1024,
        **{key.replace("__", "."): value for key, value in values.items()},
    }
    return resolve(load_config(None, [f"{k}={v}" for k, v in settings.items()]))


def gradients(engine: Engine, batch: MicroBatchTensors) -> dict[str, torch.Tensor]:
    """Return loss and gradients of one micro-batch, by name."""
    loss = engine.module(batch.to(engine.device.torch_device)) / batch.num_label_tokens
    loss.backward()
    result = {"loss": loss.detach().clone()}
    for name, parameter in engine.named_parameters.items():
        assert parameter.grad is not None, name
        result[name] = parameter.grad.detach().clone()
    engine.optimizer.zero_grad(set_to_none=True)
    return result


def model_rows(model_dir: Path) -> Iterator[dict[str, Any]]:
    """A whole model: packed against alone, and each toggle against plain float32.

    Liger patches the model's classes for the rest of the process, so it comes last.
    """
    rows = random_rows(LENGTHS, vocab_size=32000, generator=np.random.default_rng(0))
    batch = make_tensors(rows)
    plain = config_of(model_dir, model__loss_kernel="logits")
    with claim(plain, memory_limit_bytes=100 * GIB) as device:
        engine = build(plain, device, random_init=True)
        with torch.no_grad():
            packed = engine.module.hidden_states(batch.to(device.torch_device))[0]
            alone = [
                engine.module.hidden_states(make_tensors([row]).to(device.torch_device))[0]
                for row in rows
            ]
            padded = engine.module.hidden_states(
                make_tensors(rows, padded_to=1024).to(device.torch_device)
            )
        pieces = packed.split(list(LENGTHS))
        lines = [line[: len(a)] for line, a in zip(padded, pieces, strict=True)]
        yield {
            "what": "packed against single rows, last hidden states, bf16",
            "error": max(relative_error(a, b) for a, b in zip(pieces, alone, strict=True)),
            "limit": 2e-2,
        }
    exact = config_of(
        model_dir, model__loss_kernel="logits", engine__param_dtype="fp32",
        model__attn_implementation="reference",
    )  # fmt: skip
    with claim(exact, memory_limit_bytes=100 * GIB) as device:
        engine = build(exact, device, random_init=True)
        with torch.no_grad():
            states = engine.module.hidden_states(batch.to(device.torch_device))[0]
        expected = gradients(engine, batch)
        del engine
    for name, actual in (("packed (varlen)", pieces), ("padded (sdpa)", lines)):
        yield {
            "what": f"{name} bf16 against float32, distance of all last hidden states",
            "error": float((torch.cat(list(actual)) - states).norm() / states.norm()),
            "limit": 2e-2,
        }
    yield from _toggle_rows(model_dir, batch, expected)


def _toggle_rows(
    model_dir: Path, batch: MicroBatchTensors, expected: dict[str, torch.Tensor]
) -> Iterator[dict[str, Any]]:
    """Each toggle's gradient: in bf16 no farther from float32 than plain bf16 is.

    Where a toggle repeats the same arithmetic it is compared with plain bf16 too; Liger's layers
    round elsewhere, so they are compared in float32.
    """
    norm = _norm(expected)
    forms: list[tuple[str, dict[str, Any]]] = [
        ("no toggle", {"model__loss_kernel": "logits"}),
        ("chunked loss", {"model__loss_kernel": "chunked"}),
        *(
            (f"checkpointing {form}", {"model__gradient_checkpointing": form,
                                       "model__loss_kernel": "logits"})
            for form in ("selective", "selective_matmul", "every_2", "full")
        ),
        ("fsdp2", {"engine__strategy": "fsdp2", "model__loss_kernel": "logits"}),
        ("fused loss", {"model__loss_kernel": "fused"}),
        ("Liger layers and loss", {"model__use_liger": True, "model__loss_kernel": "fused"}),
    ]  # fmt: skip
    plain: dict[str, torch.Tensor] = {}
    noise = 0.0
    for name, values in forms:
        actual = _gradients_under(config_of(model_dir, **values), batch)
        if not plain:
            plain = actual
            noise = _distance(plain, expected) / norm
        yield {
            "what": f"{name}: bf16 gradient against float32, at most 1.1 times plain bf16's",
            "error": _distance(actual, expected) / norm,
            "limit": 1.1 * noise,
        }
        yield {
            "what": f"{name}: loss against float32",
            "error": relative_error(actual["loss"], expected["loss"]),
            "limit": 1e-3,
        }
        if "Liger" not in name:
            yield {
                "what": f"{name}: bf16 gradient against plain bf16",
                "error": _distance(actual, plain) / norm,
                "limit": 1e-2,
            }
    exact = config_of(
        model_dir, model__use_liger=True, model__loss_kernel="fused", engine__param_dtype="fp32",
        model__attn_implementation="reference",
    )  # fmt: skip
    yield {
        "what": "Liger layers and loss in float32: gradient against float32",
        "error": _distance(_gradients_under(exact, batch), expected) / norm,
        "limit": 1e-2,
    }


def _gradients_under(config: Config, batch: MicroBatchTensors) -> dict[str, torch.Tensor]:
    with claim(config, memory_limit_bytes=100 * GIB) as device:
        return gradients(build(config, device, random_init=True), batch)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    squares = [
        (_full(one[n]).double() - _full(other[n]).double()).square().sum()
        for n in other
        if n != "loss"
    ]
    return float(torch.stack(squares).sum().sqrt())


def _norm(gradient: dict[str, torch.Tensor]) -> float:
    squares = [g.double().square().sum() for n, g in gradient.items() if n != "loss"]
    return float(torch.stack(squares).sum().sqrt())


def all_rows() -> Iterator[dict[str, Any]]:
    """Yield every comparison."""
    yield from attention_rows()
    yield from loss_rows()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        yield from model_rows(Path(folder))


if __name__ == "__main__":
    failed = 0
    for row in all_rows():
        failed += row["error"] > row["limit"]
        mark = "FAR" if row["error"] > row["limit"] else "ok"
        print(f"{mark:4} {row['error']:.2e} <= {row['limit']:.0e}  {row['what']}", flush=True)
        if len(sys.argv) > 1:
            with Path(sys.argv[1]).open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    sys.exit(1 if failed else 0)
