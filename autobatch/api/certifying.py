"""Whether a tuned config still describes the data and the machine, and proof anew if not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from autobatch.api.inputs import Inputs, Talk
from autobatch.config import candidate_of, with_values
from autobatch.errors import ConfigError, StaleError
from autobatch.hardware.environment import describe
from autobatch.launching import beside
from autobatch.plan.epochs import Plan
from autobatch.plan.worst import worst_micro_batch
from autobatch.probing.runner import ProbeRunner, error_of
from autobatch.records import Certificate, Trial, fits
from autobatch.storage import to_plain
from autobatch.tuning.certificate import certify, recertify
from autobatch.tuning.evidence import Evidence, read_evidence
from autobatch.tuning.space import load_of
from autobatch.tuning.verdict import law_key
from autobatch.units import format_gib

ON_STALE = ("refuse", "warn")
_TIMEOUT_SECS = 900.0
_TRIAL_PREFIX = "p"  # of launch; those of a search begin with t


@dataclass(frozen=True, kw_only=True)
class Proven:
    """A config with the certificate of its plan."""

    config: DictConfig
    trial: Trial | None = None  # stepped just now; None: an older trial covers the plan
    probes: Path | None = None  # the folder of its probe


def check_on_stale(on_stale: str) -> None:
    """Refuse an unknown value.

    Raises:
        ConfigError: naming the known ones.
    """
    if on_stale not in ON_STALE:
        raise ConfigError(f"--on-stale {on_stale} is unknown; use {' or '.join(ON_STALE)}")


def certified(
    loaded: DictConfig,
    inputs: Inputs,
    plan: Plan,
    *,
    run_dir: Path,
    on_stale: str,
    dry_run: bool,
    talk: Talk,
) -> Proven:
    """Return the config with the certificate of this very plan.

    The plan is replayed. Where its worst micro-batch is larger than the one that was stepped
    (other rows, another seed, more epochs), that one is stepped now, under the same limit, in a
    folder beside `run_dir`, which stays as it is.

    Raises:
        StaleError: if model, versions, toggles or ranks changed, or the new worst micro-batch
            does not fit.
    """
    evidence, tuning = read_evidence(inputs.config), inputs.config.tuning
    if evidence is None or tuning is None:
        talk("warning: this config was never tuned, so nothing proves that it fits in memory")
        return Proven(config=loaded)
    proven = evidence.winner
    changed = _changes(evidence, inputs, plan)
    if changed:
        sentence = f"the tuned config is stale: {'; '.join(changed)}"
        if on_stale == "refuse":
            raise StaleError(f"{sentence}; run `autobatch tune` again, or launch --on-stale warn")
        talk(f"warning: {sentence}; it is launched all the same, unproven")
        unproven = replace(certify(plan, proven), proven_by=None)
        return Proven(config=_with(loaded, tuning, unproven, proven))
    certificate = recertify(plan, proven=proven)
    if certificate is not None:
        if certificate.plan_hash != evidence.certificate.plan_hash:
            talk(
                "the micro-batches are other ones than when tuned, and still proven to fit: all "
                f"{certificate.num_micro_batches:,} were replayed, none is larger than the "
                "proven one"
            )
        return Proven(config=_with(loaded, tuning, certificate, proven))
    if dry_run:
        talk("the worst micro-batch is larger than the proven one; launch will step it first")
        return Proven(config=loaded)
    probes = beside(run_dir, "probes")
    trial = _step_worst(loaded, inputs, plan, proven, probes, talk)
    config = _with(loaded, tuning, certify(plan, trial), trial)
    return Proven(config=config, trial=trial, probes=probes)


def _changes(evidence: Evidence, inputs: Inputs, plan: Plan) -> list[str]:
    """Return a sentence for each thing the verdict depends on that is another one now."""
    proven, now = evidence.winner, candidate_of(inputs.config)
    here = law_key(
        gpu=str(evidence.law_key.get("gpu")),
        spec=inputs.spec,
        candidate=now,
        environment=describe(device=inputs.config.trainer.device),
        config=inputs.config,
    )
    changed = []
    for name, value in here.items():
        before = evidence.law_key.get(name)
        if name == "model":
            if before != value:
                changed.append("the model's shape is another one")
        elif name == "settings":
            old = before if isinstance(before, Mapping) else {}
            changed += [
                f"{key} was {old.get(key)}, now it is {setting}"
                for key, setting in value.items()
                if old.get(key) != setting
            ]
        elif name != "toggles" and before != value:
            changed.append(f"{name} was {before}, here it is {value}")
    if now.toggles != proven.candidate.toggles:
        changed.append("toggles of the engine were changed")
    ranks = plan.settings.data_parallel_size
    if ranks != proven.data_parallel_size:
        changed.append(f"tuned for {proven.data_parallel_size} rank(s), now {ranks}")
    return changed


def _step_worst(
    loaded: DictConfig, inputs: Inputs, plan: Plan, proven: Trial, probes: Path, talk: Talk
) -> Trial:
    _, worst = worst_micro_batch(plan)
    assert worst.step is not None  # a launch replays rows
    talk(
        f"the worst micro-batch is larger than the proven one: {worst.tokens:,} tokens at step "
        f"{worst.step + 1}; stepping it under {format_gib(proven.memory_limit_bytes)}"
    )
    shutil.rmtree(probes, ignore_errors=True)  # of a launch that was killed
    with ProbeRunner(
        out_dir=probes,
        config=loaded,
        num_ranks=1 if proven.simulated_ranks else proven.data_parallel_size,
        simulated_ranks=proven.simulated_ranks,
        stand_in_for=proven.stand_in_for,
        memory_limit_bytes=proven.memory_limit_bytes,
        environment=describe(device=inputs.config.trainer.device),
        trial_prefix=_TRIAL_PREFIX,
    ) as runner:
        trial = runner.run(candidate_of(inputs.config), load_of(plan), timeout_secs=_TIMEOUT_SECS)
    if trial.outcome == "error":
        raise error_of(trial, out_dir=probes)
    if not fits(trial):
        shutil.rmtree(probes)
        raise StaleError(
            f"the tuned config is stale: its worst micro-batch now has {worst.tokens:,} tokens "
            f"and does not fit ({trial.outcome}); run `autobatch tune` again"
        )
    talk(f"it fits: {format_gib(trial.peak_reserved_bytes)}")
    return trial


def _with(
    loaded: DictConfig, tuning: dict[str, Any], certificate: Certificate, proven: Trial
) -> DictConfig:
    evidence = {"winner": to_plain(proven), "certificate": to_plain(certificate)}
    return with_values(loaded, {"tuning": {**tuning, **evidence}})
