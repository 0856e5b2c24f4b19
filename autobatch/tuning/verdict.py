"""The verdict as a config that `launch` takes: settings above, evidence below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from autobatch.config import Config, candidate_values, resolve, save_config, with_values
from autobatch.records import Candidate, Certificate, ModelSpec
from autobatch.storage import to_plain
from autobatch.tuning.result import SearchResult

# Besides the toggles, what memory and speed of a step depend on.
_SETTINGS = (
    "model.lora_rank",
    "model.target_modules",
    "model.quantization",
    "engine.state_dtype",
    "engine.param_dtype",
    "engine.reduce_dtype",
    "optim.name",
)


def tuned_config(
    *,
    config: DictConfig,
    result: SearchResult,
    certificate: Certificate,
    gpu: str,
    spec: ModelSpec,
    environment: Mapping[str, Any],
    shipped_profile: str | None = None,
) -> DictConfig:
    """Return the config with the winner's settings, its ranks, and the `tuning` section.

    Nothing else changes: only TUNABLE_KEYS, trainer.nproc_per_node and trainer.nnodes.
    `shipped_profile`: the name of the lengths that stood in for data.
    """
    winner = result.winner
    evidence = {
        "gpu": gpu,
        "data_parallel_size": winner.data_parallel_size,
        "memory_limit_bytes": winner.memory_limit_bytes,
        "winner": winner,
        "tokens_per_sec": result.tokens_per_sec[winner.trial_id],
        "reason": result.reason,
        "binding": result.binding,
        "stopped_by": result.stopped_by,
        "fallbacks": [
            {
                "trial_id": trial.trial_id,
                "candidate": trial.candidate,
                "tokens_per_sec": result.tokens_per_sec[trial.trial_id],
            }
            for trial in result.fallbacks
        ],
        **({"profile": shipped_profile} if shipped_profile else {}),
        "certificate": certificate,
        "law_key": law_key(
            gpu=gpu,
            spec=spec,
            candidate=winner.candidate,
            environment=environment,
            config=resolve(config),
        ),
        "searched": result.searched,
        "left_out": result.left_out,
        "seconds": result.seconds,
    }
    values = {
        **candidate_values(winner.candidate),
        "trainer.nproc_per_node": winner.data_parallel_size,
        "trainer.nnodes": 1,
        "tuning": to_plain(evidence),
    }
    return with_values(config, values)


def law_key(
    *,
    gpu: str,
    spec: ModelSpec,
    candidate: Candidate,
    environment: Mapping[str, Any],
    config: Config,
) -> dict[str, Any]:
    """Return what a verdict's memory and speed depend on; another value makes it stale.

    `gpu` is the name the verdict is for, `card` what was stepped on; `settings` are the keys of
    model and engine that tuning does not write.
    """
    return {
        "gpu": gpu,
        "card": environment.get("gpu"),
        "settings": {key: _value(config, key) for key in _SETTINGS},
        "driver": environment.get("driver"),
        "torch": environment.get("torch"),
        "transformers": environment.get("transformers"),
        "liger": environment.get("liger_kernel"),
        "model": spec.config_hash,
        "toggles": to_plain(candidate.toggles),
    }


def write_verdict(
    *,
    config: DictConfig,
    result: SearchResult,
    certificate: Certificate,
    gpu: str,
    spec: ModelSpec,
    environment: Mapping[str, Any],
    path: Path,
    shipped_profile: str | None = None,
) -> Path:
    """Write `tuned_config` to a YAML file, whole or not at all, and return its path.

    Raises:
        AutobatchError: if it cannot be written.
    """
    save_config(
        tuned_config(
            config=config,
            result=result,
            certificate=certificate,
            gpu=gpu,
            spec=spec,
            environment=environment,
            shipped_profile=shipped_profile,
        ),
        path,
    )
    return path


def _value(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return to_plain(getattr(getattr(config, section), name))
