"""Weights come in, checkpoints go out and come back, exports load in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_cases import config_for, sample_rows
from tiny_model import tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from autobatch.engine.build import Engine, build
from autobatch.engine.device import claim
from autobatch.engine.state import export_hf, load_state, save_state
from autobatch.engine.step import StepResult, optimizer_step
from autobatch.engine.tensors import make_tensors
from autobatch.errors import ModelError

KINDS = ["qwen2", "llama", "gemma3_text"]


def _step(engine: Engine) -> StepResult:
    return optimizer_step(engine, [make_tensors(sample_rows())], learning_rate=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_export_loads_in_transformers_and_back(tmp_path: Path, kind: str, strategy: str) -> None:
    """Every tensor is the trained one, over several files, tied heads stay tied."""
    config = config_for(tiny_model(tmp_path / "model", kind), engine__strategy=strategy)
    with claim(config, memory_limit_bytes=2**32) as device:
        engine = build(config, device, random_init=True)
        _step(engine)
        export_hf(engine, tmp_path / "hf", tokenizer_path=tmp_path, shard_bytes=100_000)
        model, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", output_loading_info=True
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
        loaded = dict(model.named_parameters())
        for name, parameter in engine.named_parameters.items():
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            assert torch.equal(full, loaded[name])
        again = build(
            config_for(tmp_path / "hf", engine__strategy=strategy, model__init="pretrained"),
            device,
            random_init=False,
        )
        for name, parameter in again.named_parameters.items():
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            assert torch.equal(full, loaded[name])


def test_random_weights_have_the_model_class_s_distribution(tmp_path: Path) -> None:
    """Norms start at their neutral value and matrices at initializer_range."""
    config = config_for(tiny_model(tmp_path, "gemma3_text"), engine__strategy="single")
    oracle = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    with claim(config, memory_limit_bytes=2**32) as device:
        engine = build(config, device, random_init=True)
    for name, expected in oracle.named_parameters():
        actual = engine.named_parameters[name]
        assert float(expected.detach().std()) == pytest.approx(
            float(actual.detach().std()), rel=0.2, abs=1e-6
        )
        assert float(expected.detach().mean()) == pytest.approx(
            float(actual.detach().mean()), abs=5e-3
        )
    buffers = dict(engine.module.causal_lm.named_buffers())
    for name, buffer in oracle.named_buffers():
        assert torch.equal(buffer, buffers[name])


def test_a_checkpoint_continues_bit_for_bit_under_the_other_strategy(tmp_path: Path) -> None:
    """Master weights and moments are saved, whatever machinery held them."""
    model = tiny_model(tmp_path / "model")
    losses = {}
    for strategy in ("single", "fsdp2"):
        config = config_for(model, engine__strategy=strategy, engine__param_dtype="bf16")
        with claim(config, memory_limit_bytes=2**32) as device:
            engine = build(config, device, random_init=True)
            if strategy == "single":
                _step(engine)
                save_state(engine, tmp_path / "state")
            else:
                load_state(engine, tmp_path / "state")
            losses[strategy] = [_step(engine).loss for _ in range(2)]
    assert losses["single"] == losses["fsdp2"]


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    """One sentence with both shapes."""
    model = tiny_model(tmp_path / "model")
    config = config_for(model, engine__strategy="single")
    with claim(config, memory_limit_bytes=2**32) as device:
        export_hf(build(config, device, random_init=True), tmp_path / "hf", tokenizer_path=tmp_path)
        changed = json.loads((tmp_path / "hf" / "config.json").read_text())
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**changed, "vocab_size": 600}))
        other = config_for(tmp_path / "hf", engine__strategy="single", model__init="pretrained")
        with pytest.raises(ModelError, match=r"\(512, 64\).*\(600, 64\)"):
            build(other, device, random_init=False)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    """A file cut short is said to be damaged."""
    model = tiny_model(tmp_path / "model")
    config = config_for(model, engine__strategy="single")
    with claim(config, memory_limit_bytes=2**32) as device:
        export_hf(build(config, device, random_init=True), tmp_path / "hf", tokenizer_path=tmp_path)
        weights = tmp_path / "hf" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-20])
        other = config_for(tmp_path / "hf", engine__strategy="single", model__init="pretrained")
        with pytest.raises(ModelError, match="damaged"):
            build(other, device, random_init=False)
