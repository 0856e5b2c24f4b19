"""The proof that the worst micro-batch of the whole run was stepped and fitted."""

from __future__ import annotations

from dataclasses import replace

from autobatch.plan.epochs import plan_hash
from autobatch.plan.microbatches import MicroBatch
from autobatch.plan.settings import Plan, num_epochs
from autobatch.plan.worst import count_micro_batches, worst_micro_batch
from autobatch.records import Certificate, Trial, fits
from autobatch.tuning.space import load_of


def certify(plan: Plan, winner: Trial) -> Certificate:
    """Return the certificate of a plan; `proven_by` is None unless the winner proves it.

    It does if it was measured, fitted, and stepped the very micro-batch that is the worst of
    every micro-batch of the run.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    micro_batch, worst = worst_micro_batch(plan)
    is_proof = winner.measured and fits(winner) and winner.load == load_of(micro_batch)
    return Certificate(
        plan_hash=plan_hash(plan),
        covers="replay",
        epochs=num_epochs(plan),
        num_micro_batches=count_micro_batches(plan),
        worst=worst,
        proven_by=winner.trial_id if is_proof else None,
    )


def recertify(plan: Plan, *, proven: Trial) -> Certificate | None:
    """Return the certificate of another plan under a proven load; None if it can need more.

    Longer runs, other seeds or other rows need no new trial while their worst micro-batch has no
    more tokens, and no larger sum of squared lengths, than the one that was stepped.

    Raises:
        PlanError: if a trainable row is longer than the token budget.
    """
    micro_batch, _ = worst_micro_batch(plan)
    lengths, padded_to = proven.load.micro_batches[0], proven.load.padded_to
    stepped = MicroBatch(samples=(0,) * len(lengths), lengths=lengths, padded_to=padded_to)
    covered = (
        proven.measured
        and fits(proven)
        and (micro_batch.padded_to is None) == (padded_to is None)
        and micro_batch.num_tokens <= stepped.num_tokens
        and micro_batch.sum_squared_lengths <= stepped.sum_squared_lengths
    )
    if not covered:
        return None
    certificate = certify(plan, proven)
    return replace(certificate, proven_by=proven.trial_id)
