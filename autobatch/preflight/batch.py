"""Rules about the batch arithmetic: rows, batches, steps."""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.plan.epochs import Plan, effective_train_batch_size, num_steps, steps_per_epoch
from autobatch.preflight.rule import Finding, warn


def check_batch(plan: Plan) -> Iterator[Finding]:
    """Look at a plan; what cannot be planned at all was refused when it was made."""
    asked, used = plan.settings.train_batch_size, effective_train_batch_size(plan)
    if used < asked:
        yield warn(
            "train_batch_size_lowered",
            f"data.train_batch_size={asked} is above the {used} trainable rows; {used} is used",
        )
    ranks = plan.settings.data_parallel_size
    if used < ranks:
        yield warn(
            "idle_ranks",
            f"a step of {used} rows cannot feed {ranks} ranks; some only wait: use fewer ranks "
            "or a larger data.train_batch_size",
        )


def arithmetic(plan: Plan) -> str:
    """Return rows, batches and steps in one line."""
    per_epoch, steps = steps_per_epoch(plan), num_steps(plan)
    return (
        f"{len(plan.trainable):,} trainable rows, {effective_train_batch_size(plan):,} a step: "
        f"{per_epoch:,} steps an epoch, {steps:,} steps in all"
    )
