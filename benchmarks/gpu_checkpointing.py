"""What each form of gradient checkpointing keeps in one layer, and what it costs in time.

Layers as wide as Qwen2.5-7B's, one packed micro-batch of 16,384 tokens in rows of 512. Kept is what
lives after the forward pass of the decoder and did not before it: by the difference between four
layers and two, so that what the embedding and the last norm keep does not count.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_correctness import GIB, config_of

from autobatch.engine.build import build
from autobatch.engine.device import claim
from autobatch.engine.tensors import make_tensors, random_rows

WIDTH, HEADS, NUM_TOKENS, ROW = 3584, 28, 16_384, 512
MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 18944,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FORMS = ("none", "full", "selective", "selective_matmul", "every_2")
# bytes a token: the layer's input in bf16; attention's output in bf16 and its log-sum-exp in fp32
INPUT, ATTENTION = 2 * WIDTH, 2 * WIDTH + 4 * HEADS
EXPECTED = {"full": INPUT, "selective": INPUT + ATTENTION}


def kept_rows() -> Iterator[dict[str, Any]]:
    """One row a form: bytes kept a token and layer, bytes of the peak, seconds of four layers.

    Liger patches the model's classes for the rest of the process, so it comes last.
    """
    for liger in (False, True):
        for form in FORMS:
            two, four = (_measure(form, liger, num_layers=layers) for layers in (2, 4))
            per_layer = {
                name: round((four[name] - two[name]) / 2 / NUM_TOKENS) for name in ("kept", "peak")
            }
            yield {
                "form": form,
                "liger": liger,
                "kept_bytes_per_token_layer": per_layer["kept"],
                "expected": EXPECTED.get(form),
                "peak_bytes_per_token_layer": per_layer["peak"],
                "peak_gib": round(four["peak"] / GIB, 3),
                "forward_secs": round(four["forward_secs"], 4),
                "backward_secs": round(four["backward_secs"], 4),
            }


def _measure(form: str, liger: bool, *, num_layers: int) -> dict[str, float]:
    """Return kept bytes, the peak above weights and gradients, seconds; of a second pass."""
    rows = random_rows(
        (ROW,) * (NUM_TOKENS // ROW), vocab_size=32000, generator=np.random.default_rng(0)
    )
    with tempfile.TemporaryDirectory() as folder:
        words = {**MODEL, "num_hidden_layers": num_layers}
        (Path(folder) / "config.json").write_text(json.dumps(words))
        config = config_of(
            Path(folder),
            model__gradient_checkpointing=form,
            model__loss_kernel="fused",
            model__use_liger=liger,
        )
        with claim(config, memory_limit_bytes=130 * GIB) as device:
            engine = build(config, device, random_init=True)
            batch = make_tensors(rows).to(device.torch_device)
            began, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            for _ in range(2):  # gradients are there in the second
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                began.record()
                states = engine.module.hidden_states(batch)
                middle.record()
                kept = torch.cuda.memory_allocated() - before
                states.sum().backward()
                end.record()
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
                del states
    del engine, batch
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "kept": kept,
        "peak": peak,
        "forward_secs": began.elapsed_time(middle) / 1000,
        "backward_secs": middle.elapsed_time(end) / 1000,
    }


if __name__ == "__main__":
    for row in kept_rows():
        print(row, flush=True)
        if len(sys.argv) > 1:
            with Path(sys.argv[1]).open("a") as stream:
                stream.write(json.dumps(row) + "\n")
