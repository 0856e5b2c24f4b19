"""A tuned config whose evidence was edited is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_dirs import small_run
from trials import trial_of

from autobatch import api
from autobatch.config import candidate_of, load_config, resolve, with_values
from autobatch.dataset.lengths.planning import plan_of
from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.errors import ConfigError, StaleError
from autobatch.hardware.environment import describe
from autobatch.model import read_model_spec
from autobatch.records import Trial
from autobatch.storage import to_plain
from autobatch.tuning.certificate import certify, recertify
from autobatch.tuning.evidence import read_evidence
from autobatch.tuning.space import load_of
from autobatch.tuning.verdict import law_key


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Trial]:
    """A config, its plan, and a trial that proves it (stepped in thought only)."""
    data, model, path = small_run(tmp_path_factory.mktemp("tuned"))
    config = load_config(path)
    resolved = resolve(config)
    profile = profile_lengths([str(data)], tokenizer_dir=str(model), model=str(model))
    assert profile.cache_dir is not None
    spec = read_model_spec(str(model))
    plan = plan_of(
        resolved, candidate_of(resolved), TokenCache.open(profile.cache_dir), spec, num_ranks=1
    )
    trial = trial_of(load_of(plan), candidate_of(resolved), memory_limit_bytes=2**30)
    tuning = {
        "winner": to_plain(trial),
        "certificate": to_plain(certify(plan, trial)),
        "memory_limit_bytes": 2**30,
        "law_key": law_key(
            gpu="cpu",
            spec=spec,
            candidate=trial.candidate,
            environment=describe(device="cpu"),
            config=resolved,
        ),
    }
    return with_values(config, {"tuning": tuning}), plan, trial


def _with_tuning(config: Any, tuning: Any) -> Any:
    return resolve(with_values(config, {"tuning": tuning}))


@pytest.mark.parametrize("name", ["winner", "certificate", "memory_limit_bytes", "law_key"])
@pytest.mark.parametrize("value", [None, "text", [], {}])
def test_a_damaged_part_is_one_sentence(tuned: Any, name: str, value: Any) -> None:
    """Missing, text, a list, half a record."""
    config, _, _ = tuned
    if name == "law_key" and value == {}:
        pytest.skip("an empty key is stale, not damaged")
    damaged = {**resolve(config).tuning, name: value}
    if value is None:
        damaged.pop(name)
    with pytest.raises(ConfigError, match="run `autobatch tune` again"):
        read_evidence(_with_tuning(config, damaged))


def test_a_whole_part_is_read(tuned: Any) -> None:
    """The trial comes back equal."""
    config, _, trial = tuned
    evidence = read_evidence(resolve(config))
    assert evidence is not None
    assert trial == evidence.winner


def test_a_smaller_plan_needs_no_new_proof_and_a_larger_one_does(tuned: Any) -> None:
    """By tokens, and by squared lengths."""
    _, plan, trial = tuned
    assert recertify(plan, proven=trial) == certify(plan, trial)
    first, *rest = trial.load.micro_batches
    shorter = replace(
        trial, load=replace(trial.load, micro_batches=(first[:-1],) * (1 + len(rest)))
    )
    assert recertify(plan, proven=shorter) is None
    flat = replace(trial, load=replace(trial.load, micro_batches=((1,) * sum(first),)))
    assert recertify(plan, proven=flat) is None
    assert recertify(plan, proven=replace(trial, measured=False)) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"law_key": {"torch": "1.0"}}, "torch was 1.0, here it is"),
        ({"law_key": {"driver": "999"}}, "driver was 999, here it is None"),
        ({"law_key": {"card": "other"}}, "card was other, here it is None"),
        ({"law_key": {"model": "other"}}, "the model's shape is another one"),
        ({"setting": "engine.param_dtype=bf16"}, "engine.param_dtype was fp32, now it is bf16"),
        ({"setting": "model.lora_rank=4"}, "model.lora_rank was 0, now it is 4"),
        ({"setting": "model.gradient_checkpointing=full"}, "toggles of the engine were changed"),
        ({"setting": "trainer.nproc_per_node=2"}, r"tuned for 1 rank\(s\), now 2"),
    ],
)
def test_what_a_verdict_depends_on_makes_it_stale(
    tuned: Any, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """Every key of the law, every setting of model and engine; exit 4."""
    from autobatch.config import save_config

    config, _, _ = tuned
    tuning = resolve(config).tuning
    key = {**tuning["law_key"], **changes.get("law_key", {})}
    path = tmp_path / "tuned.yaml"
    save_config(with_values(config, {"tuning": {**tuning, "law_key": key}}), path)
    overrides = [changes["setting"]] if "setting" in changes else []
    with pytest.raises(StaleError, match=words):
        api.launch(path, overrides=overrides, dry_run=True, talk=lambda line: None)
