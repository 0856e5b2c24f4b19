"""Configs load the same by every route and refuse what they do not know."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from autobatch.config import (
    TUNABLE_KEYS,
    candidate_of,
    candidate_values,
    load_config,
    overridden_keys,
    resolve,
    save_config,
    with_values,
)
from autobatch.config.schema import known_keys
from autobatch.errors import ConfigError
from autobatch.records import Candidate, Toggles


@pytest.mark.parametrize(
    "text", ["1e-5", "1.0e-5", "1e-05", "0.00001", ".00001", "${oc.env:AB_LR}"]
)
def test_a_number_is_a_number_by_every_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """File, override, environment (report E02)."""
    monkeypatch.setenv("AB_LR", "1e-5")
    path = tmp_path / "c.yaml"
    path.write_text(f"optim:\n  lr: {text}\n")
    assert 1e-5 == resolve(load_config(path)).optim.lr
    assert 1e-5 == resolve(load_config(None, [f"optim.lr={text}"])).optim.lr


def test_a_saved_config_reads_the_same_in_both_yaml_readers(tmp_path: Path) -> None:
    """PyYAML reads 1e-05 as text, so floats are written with a point."""
    config = load_config(None, ["optim.lr=1e-5", "optim.weight_decay=0", "data.train_files=[a]"])
    save_config(config, tmp_path / "c.yaml")
    plain = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert 1e-5 == plain["optim"]["lr"]
    assert isinstance(plain["optim"]["weight_decay"], float)
    assert resolve(config) == resolve(load_config(tmp_path / "c.yaml"))
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "c.yaml"))["optim"] == plain["optim"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optim.lrr=1", "unknown key optim.lrr; did you mean optim.lr"),
        ("micro_batch_size_per_gpu=4", "did you mean data.micro_batch_size_per_gpu"),
        ("zzz=1", "sections are data, model"),
        ("data.max_length=abc", "data.max_length='abc' has the wrong type; give a whole number"),
        ("optim.lr=None", "optim.lr='None' has the wrong type; give a number"),
        ("optim.lr=nan", "optim.lr=nan is below 0"),
        ("trainer.save_freq=off", "trainer.save_freq=False has the wrong type"),
        ("model.loss_kernel=fuse", "did you mean fused"),
        ("data.train_batch_size=0", "data.train_batch_size=0 is below 1"),
        ("data.val_fraction=1.5", "leaves no row to train on"),
        ("optim.betas=[0.9]", "not two numbers"),
        ("trainer.logger=[console,wandb]", "trainer.logger=wandb does not work"),
        ("tuning.winner=x", "is evidence"),
        ("lr", "write key=value"),
    ],
)
def test_a_wrong_setting_is_refused_with_key_value_and_move(setting: str, words: str) -> None:
    """Before anything heavy is imported."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "key", "value"),
    [
        ("model.partial_pretrain=/m", "model.path", "/m"),
        ("use_remove_padding=false", "model.use_remove_padding", False),
        ("model.enable_gradient_checkpointing=true", "model.gradient_checkpointing", "full"),
        ("model.enable_gradient_checkpointing=False", "model.gradient_checkpointing", "none"),
        ("model.strategy=fsdp2", "engine.strategy", "fsdp2"),
        ("engine.dtype=bfloat16", "engine.param_dtype", "bf16"),
        ("optim.lr_warmup_steps_ratio=0.1", "optim.warmup_steps_ratio", 0.1),
        ("trainer.default_local_dir=/o", "trainer.output_dir", "/o"),
        ("trainer.n_gpus_per_node=4", "trainer.nproc_per_node", 4),
        ("data.train_files=a.parquet", "data.train_files", ["a.parquet"]),
    ],
)
def test_verl_spellings_are_aliases(setting: str, key: str, value: object) -> None:
    """Both trainers' names set our key."""
    config = load_config(None, [setting])
    assert value == OmegaConf.select(config, key)
    assert {key} == overridden_keys([setting])


def test_interpolations_stay_unresolved_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an unset variable is one sentence."""
    config = load_config(None, ["trainer.output_dir=${oc.env:HOME}/x"])
    save_config(config, tmp_path / "c.yaml")
    assert "${oc.env:HOME}/x" in (tmp_path / "c.yaml").read_text()
    with pytest.raises(ConfigError, match="AB_NOT_SET"):
        load_config(None, ["trainer.output_dir=${oc.env:AB_NOT_SET}"])


@pytest.mark.parametrize(
    "text", ["", "- a\n", "data: 3\n", "a: [\n", "x: {\n", "data:\n  max_length: {}\n", "1\n"]
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    """Empty, a list, a scalar, half a document: a ConfigError, or an empty config."""
    path = tmp_path / "c.yaml"
    path.write_text(text)
    if not text:
        assert resolve(load_config(None)) == resolve(load_config(path))
        return
    with pytest.raises(ConfigError):
        load_config(path)


def test_mixed_batch_forms_are_refused_with_both_valid_ones() -> None:
    """Padding-free and padded settings are two forms, not three switches."""
    config = load_config(None, ["data.micro_batch_size_per_gpu=4"])
    with pytest.raises(ConfigError, match=r"true, true, N, null .* or false, false, null, N"):
        candidate_of(resolve(config))


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(toggles=Toggles(), max_token_len_per_gpu=64),
        Candidate(
            toggles=Toggles(use_remove_padding=False, attn_implementation="sdpa"),
            micro_batch_size_per_gpu=4,
        ),
    ],
)
def test_a_candidate_goes_into_a_config_and_back(candidate: Candidate) -> None:
    """It writes TUNABLE_KEYS and nothing else."""
    values = candidate_values(candidate)
    assert set(values) == set(TUNABLE_KEYS)
    config = with_values(load_config(None), values)
    assert candidate == candidate_of(resolve(config))


def test_every_tunable_key_is_a_key() -> None:
    """A renamed key would be written into nothing."""
    assert set(TUNABLE_KEYS) <= set(known_keys())


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("max_steps", "trainer.total_training_steps"),
        ("trainer.max_steps", "trainer.total_training_steps"),
        ("trainer.total_steps", "trainer.total_training_steps"),
        ("num_train_epochs", "trainer.total_epochs"),
        ("learning_rate", "optim.lr"),
        ("per_device_train_batch_size", "data.micro_batch_size_per_gpu"),
        ("cutoff_len", "data.max_length"),
    ],
)
def test_other_trainers_words_lead_to_the_key(key: str, meant: str) -> None:
    """What another tool calls a key is told apart from what merely looks like it."""
    with pytest.raises(ConfigError, match=rf"did you mean {meant}\?"):
        load_config(None, [f"{key}=5"])
