"""What each form of gradient checkpointing keeps: bytes a token and layer, by size of block.

Layers as wide as Qwen2.5-7B's, four of them, one packed micro-batch of 16,384 tokens in rows of
512. Kept is what lives after the forward pass of the decoder and did not before it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_correctness import GIB, config_of

from autobatch.engine.build import build
from autobatch.engine.device import claim
from autobatch.engine.tensors import make_tensors, random_rows

WIDTH, HEADS, NUM_LAYERS, NUM_TOKENS, ROW = 3584, 28, 4, 16_384, 512
MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 18944,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
# bytes a token: the layer's input in bf16; attention's output in bf16 and its log-sum-exp in fp32
INPUT, ATTENTION = 2 * WIDTH, 2 * WIDTH + 4 * HEADS
EXPECTED = {"full": INPUT, "selective": INPUT + ATTENTION}


def kept_rows(model_dir: Path) -> Iterator[dict[str, Any]]:
    """One row a form: kept bytes a token and layer, peak and seconds of forward and backward."""
    rows = random_rows(
        (ROW,) * (NUM_TOKENS // ROW), vocab_size=32000, generator=np.random.default_rng(0)
    )
    for liger in (False, True):
        for form in ("none", "full", "selective", "selective_matmul", "every_2"):
            config = config_of(
                model_dir,
                model__gradient_checkpointing=form,
                model__loss_kernel="fused",
                model__use_liger=liger,
            )
            with claim(config, memory_limit_bytes=130 * GIB) as device:
                engine = build(config, device, random_init=True)
                batch = make_tensors(rows).to(device.torch_device)
                for _ in range(2):
                    torch.cuda.reset_peak_memory_stats()
                    before, blocks = torch.cuda.memory_allocated(), _blocks()
                    began, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
                    began.record()
                    states = engine.module.hidden_states(batch)
                    middle.record()
                    kept = torch.cuda.memory_allocated() - before - states.nbytes
                    new = _blocks() - blocks
                    states.sum().backward()
                    end.record()
                    torch.cuda.synchronize()
                    peak = torch.cuda.max_memory_allocated()
                    engine.optimizer.zero_grad(set_to_none=True)
                    del states
                yield {
                    "form": form,
                    "liger": liger,
                    "kept_bytes_per_token_layer": round(kept / NUM_TOKENS / NUM_LAYERS),
                    "expected": EXPECTED.get(form),
                    "peak_gib": round(peak / GIB, 3),
                    "forward_secs": began.elapsed_time(middle) / 1000,
                    "backward_secs": middle.elapsed_time(end) / 1000,
                    "largest_blocks": [
                        {"bytes_per_token": round(size / NUM_TOKENS), "count": count}
                        for size, count in sorted(new.items(), key=lambda b: -b[0] * b[1])[:6]
                    ],
                }
                del engine, batch
            torch.cuda.empty_cache()


def _blocks() -> Counter[int]:
    return Counter(
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for row in kept_rows(Path(folder)):
            print(row, flush=True)
            if len(sys.argv) > 1:
                with Path(sys.argv[1]).open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
