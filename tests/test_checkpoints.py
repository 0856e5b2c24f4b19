"""Checkpoints are found whole, thinned out safely; a proof covers what needs no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trials import trial_of

from autobatch.plan.epochs import plan_hash
from autobatch.plan.settings import Plan, PlanSettings, make_plan
from autobatch.training import checkpoints
from autobatch.tuning.certificate import recertify
from autobatch.tuning.space import load_of


def write_checkpoints(run_dir: Path, *steps: int) -> None:
    for step in steps:
        (checkpoints.prepare(run_dir, step) / "state.distcp").write_bytes(b"state")
        checkpoints.complete(run_dir, step=step, order_hash="order", num_ranks=1)


def damage(run_dir: Path, step: int, how: str = "cut") -> None:
    victim = checkpoints.directory_of(run_dir, step) / "state.distcp"
    if how == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif how == "missing":
        victim.unlink()
    elif how == "empty":
        victim.write_bytes(b"")
    else:
        (victim.parent / checkpoints.MARKER).unlink()


def steps_in(run_dir: Path) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("how", ["cut", "missing", "empty", "marker"])
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, how: str) -> None:
    """The newest whole one is continued."""
    write_checkpoints(tmp_path, 3, 6)
    damage(tmp_path, 6, how)
    path, skipped = checkpoints.newest(tmp_path)
    assert checkpoints.directory_of(tmp_path, 3) == path
    assert str(checkpoints.directory_of(tmp_path, 6)) in skipped[0]


def test_thinning_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    """As many as asked for; None keeps all."""
    write_checkpoints(tmp_path, 1, 2, 3, 4)
    checkpoints.thin_out(tmp_path, most=None)
    assert [1, 2, 3, 4] == steps_in(tmp_path)
    checkpoints.thin_out(tmp_path, most=2)
    assert [3, 4] == steps_in(tmp_path)


def test_thinning_never_deletes_the_only_whole_checkpoint(tmp_path: Path) -> None:
    """Newer damaged ones take nobody's place."""
    write_checkpoints(tmp_path, 1, 2, 3)
    damage(tmp_path, 2)
    damage(tmp_path, 3)
    checkpoints.thin_out(tmp_path, most=1)
    assert [1, 2, 3] == steps_in(tmp_path)


def test_thinning_removes_damaged_ones_below_the_newest_whole_one(tmp_path: Path) -> None:
    """They cannot be continued, and a newer one can."""
    write_checkpoints(tmp_path, 1, 2, 3)
    damage(tmp_path, 2)
    checkpoints.thin_out(tmp_path, most=2)
    assert [1, 3] == steps_in(tmp_path)


# ---- a proof under another plan ------------------------------------------------


def plan_of(*lengths: int, seed: int = 0, epochs: int = 1) -> Plan:
    settings = PlanSettings(
        train_batch_size=len(lengths),
        data_parallel_size=1,
        seed=seed,
        total_epochs=epochs,
        total_training_steps=None,
        max_token_len_per_gpu=100,
        micro_batch_size_per_gpu=None,
        use_remove_padding=True,
    )
    tokens = np.array(lengths)
    return make_plan(settings, lengths=tokens, label_tokens=tokens - 1)


def test_a_longer_run_is_covered_by_the_same_proof() -> None:
    """The certificate is of the new plan, proven by the old trial."""
    longer = plan_of(60, 60, 60, epochs=3)
    certificate = recertify(longer, proven=trial_of(load_of(plan_of(60, 60, 60))))
    assert certificate is not None
    assert (plan_hash(longer), 3, "t001") == (
        certificate.plan_hash,
        certificate.epochs,
        certificate.proven_by,
    )


def test_fewer_tokens_are_covered() -> None:
    """No micro-batch is larger than the one that was stepped."""
    assert recertify(plan_of(55, 55), proven=trial_of(load_of(plan_of(60, 60)))) is not None


def test_more_tokens_are_not_covered() -> None:
    """One token more asks for a new trial."""
    assert recertify(plan_of(61, 61), proven=trial_of(load_of(plan_of(60, 60)))) is None


def test_longer_rows_of_as_many_tokens_are_not_covered() -> None:
    """Attention can take memory by length squared."""
    proven = trial_of(load_of(plan_of(30, 30)))
    assert 60 == sum(proven.load.micro_batches[0])
    assert recertify(plan_of(60, 60), proven=proven) is None


@pytest.mark.parametrize("changes", [{"measured": False}, {"outcome": "oom"}])
def test_what_was_not_stepped_or_did_not_fit_covers_nothing(changes: dict[str, object]) -> None:
    """Only a measured trial within its limit is a proof."""
    plan = plan_of(60, 60)
    assert recertify(plan, proven=replace(trial_of(load_of(plan)), **changes)) is None
