"""The proof that the worst micro-batch of the whole run was stepped and fitted."""

from __future__ import annotations

from dataclasses import replace

from autobatch.plan.epochs import plan_hash
from autobatch.plan.settings import Plan, num_epochs
from autobatch.plan.worst import count_micro_batches, worst_micro_batch
from autobatch.records import Certificate, Load, Trial, fits
from autobatch.tuning.space import load_of


def certify(plan: Plan, winner: Trial) -> Certificate:
    """Return the certificate of a plan; `proven_by` is None unless the winner proves it.

    It does if it was measured, fitted, and stepped the very micro-batch that is the worst of
    every micro-batch of the run. The plan of a shipped profile covers every order of its rows.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    _, worst = worst_micro_batch(plan)
    is_proof = winner.measured and fits(winner) and winner.load == load_of(plan)
    return Certificate(
        plan_hash=plan_hash(plan),
        covers="any_draw" if plan.any_draw else "replay",
        epochs=num_epochs(plan),
        num_micro_batches=count_micro_batches(plan),
        worst=worst,
        proven_by=winner.trial_id if is_proof else None,
    )


def recertify(plan: Plan, *, proven: Trial) -> Certificate | None:
    """Return the certificate of another plan under a proven load; None if it can need more.

    Longer runs, other seeds or other rows need no new trial while their worst micro-batch has no
    more tokens, and none a larger sum of squared lengths, than what was stepped.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    needed, stepped = load_of(plan), proven.load
    covered = (
        proven.measured
        and fits(proven)
        and (needed.padded_to is None) == (stepped.padded_to is None)
        and all(most(needed) <= most(stepped) for most in (_most_tokens, _most_squared))
    )
    if not covered:
        return None
    certificate = certify(plan, proven)
    return replace(certificate, proven_by=proven.trial_id)


def _most_tokens(load: Load) -> int:
    return max(map(sum, _computed(load)))


def _most_squared(load: Load) -> int:
    return max(sum(n * n for n in lengths) for lengths in _computed(load))


def _computed(load: Load) -> list[tuple[int, ...]]:
    """Return the computed lengths of each micro-batch: padded ones count."""
    if load.padded_to is None:
        return list(load.micro_batches)
    return [(load.padded_to,) * len(lengths) for lengths in load.micro_batches]
