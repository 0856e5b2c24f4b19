"""Packed rows do not see each other, and give what each row gives alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import config_for
from tiny_model import tiny_model
from transformers import AutoModelForCausalLM

from autobatch.engine.build import Engine, build
from autobatch.engine.device import claim
from autobatch.engine.tensors import Row, make_tensors, random_rows

KINDS = ["qwen2", "qwen3", "llama", "mistral", "gemma2", "gemma3_text"]
LENGTHS = (7, 13, 30, 1)


def _logits(engine: Engine, rows: list[Row], padded_to: int | None = None) -> list[torch.Tensor]:
    """Return the logits of each row, (L, V)."""
    batch = make_tensors(rows, padded_to=padded_to)
    with torch.no_grad():
        hidden = engine.module.hidden_states(batch)
        logits = engine.module.causal_lm.get_output_embeddings()(hidden)
        cap = getattr(engine.module.causal_lm.config, "final_logit_softcapping", None)
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
    if padded_to is None:
        return list(logits[0].split(list(batch.row_lengths)))
    return [line[:length] for line, length in zip(logits, batch.row_lengths, strict=True)]


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path: Path):
    config = config_for(tiny_model(tmp_path, request.param), engine__strategy="single")
    with claim(config, memory_limit_bytes=2**32) as device:
        yield build(config, device, random_init=True)


def test_changing_one_packed_row_changes_no_other(engine: Engine) -> None:
    """Not by one bit."""
    rows = random_rows(LENGTHS, vocab_size=512, generator=np.random.default_rng(1))
    before = _logits(engine, rows)
    for changed in range(len(rows)):
        ids = (rows[changed].ids + 1) % 512
        others = [*rows]
        others[changed] = Row(ids=ids, label_mask=rows[changed].label_mask)
        for position, (old, new) in enumerate(zip(before, _logits(engine, others), strict=True)):
            assert (position != changed) == torch.equal(old, new)


def test_packed_and_padded_logits_equal_eager_transformers(engine: Engine) -> None:
    """Each row alone through transformers' own eager attention is the oracle."""
    oracle = AutoModelForCausalLM.from_config(
        engine.module.causal_lm.config, attn_implementation="eager"
    )
    oracle.load_state_dict(engine.module.causal_lm.state_dict())
    oracle.eval()
    rows = random_rows(LENGTHS, vocab_size=512, generator=np.random.default_rng(1))
    packed, padded = _logits(engine, rows), _logits(engine, rows, padded_to=32)
    for row, one, other in zip(rows, packed, padded, strict=True):
        with torch.no_grad():
            ids = torch.from_numpy(row.ids.astype(np.int64))[None]
            expected = oracle(input_ids=ids, use_cache=False).logits[0]
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-5)
