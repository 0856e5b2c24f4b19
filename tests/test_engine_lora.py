"""LoRA trains its matrices, all of them, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_cases import ROW_LENGTHS, config_for, sample_rows, step_cases
from peft import PeftModel
from tiny_model import tiny_model
from transformers import AutoModelForCausalLM

from autobatch.engine.build import adapted, build
from autobatch.engine.device import claim
from autobatch.engine.state import export_hf, load_state, save_state
from autobatch.engine.step import optimizer_step
from autobatch.engine.tensors import make_tensors

SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_all_linear_is_the_seven_projections(tmp_path: Path, kind: str, strategy: str) -> None:
    """Not the head, not the embedding, tied or not (report D04); the base is frozen bf16."""
    config = config_for(
        tiny_model(tmp_path, kind),
        engine__strategy=strategy,
        engine__param_dtype="bf16",
        model__lora_rank=4,
    )
    with claim(config, memory_limit_bytes=2**32) as device:
        engine = build(config, device, random_init=True)
        assert SEVEN == {name.rpartition(".")[2] for name in adapted(engine)}
        assert 2 * 7 == len(adapted(engine))
        before = {n: _full(p).clone() for n, p in engine.named_parameters.items()}
        for _ in range(2):  # B is zero at first, so A learns from the second step on
            optimizer_step(engine, [make_tensors(sample_rows())], learning_rate=1e-2)
        for name, parameter in engine.named_parameters.items():
            is_trained = ".lora_" in name
            assert is_trained == parameter.requires_grad
            assert (torch.float32 if is_trained else torch.bfloat16) == parameter.dtype
            assert is_trained != torch.equal(before[name], _full(parameter))


def _full(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_changes_no_adapter_gradient(tmp_path: Path, checkpointing: str) -> None:
    """Frozen embeddings give inputs without gradient (report D05)."""
    model = tiny_model(tmp_path)
    case = {"size": len(ROW_LENGTHS), "by_tokens": False, "padded": False}
    plain, other = (
        step_cases(
            config_for(
                model,
                engine__strategy="single",
                model__lora_rank=4,
                model__gradient_checkpointing=form,
            ),
            [case],
        )[0]
        for form in ("none", checkpointing)
    )
    assert plain["grad_norm"] > 0
    assert plain == pytest.approx(other, rel=1e-5)


def test_export_loads_with_peft_and_a_checkpoint_continues(tmp_path: Path) -> None:
    """The adapter directory gives the trained model; run state holds the adapters only."""
    base = tiny_model(tmp_path / "model")
    plain = config_for(base, engine__strategy="single")
    with claim(plain, memory_limit_bytes=2**32) as device:
        export_hf(
            build(plain, device, random_init=True), tmp_path / "base", tokenizer_path=tmp_path
        )
    config = config_for(
        tmp_path / "base", engine__strategy="single", model__lora_rank=4, model__init="pretrained"
    )
    batch = make_tensors(sample_rows())
    with claim(config, memory_limit_bytes=2**32) as device:
        engine = build(config, device, random_init=False)
        for _ in range(2):
            optimizer_step(engine, [batch], learning_rate=1e-2)
        export_hf(engine, tmp_path / "adapter", tokenizer_path=tmp_path)
        save_state(engine, tmp_path / "state")
        expected = engine.module.hidden_states(batch)
        again = build(config, device, random_init=False)
        load_state(again, tmp_path / "state")
        assert torch.equal(expected, again.module.hidden_states(batch))
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    ids = batch.input_ids[:, : ROW_LENGTHS[0]]
    hidden = loaded.get_base_model().model(input_ids=ids, use_cache=False)[0]
    torch.testing.assert_close(expected[:, : ROW_LENGTHS[0]], hidden, rtol=1e-4, atol=1e-4)
