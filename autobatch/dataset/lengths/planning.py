"""The plan of a config over its cached samples: one function for parent and child."""

from __future__ import annotations

from autobatch.config import Config
from autobatch.dataset.lengths.shipped import ShippedSamples
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.dataset.tokens.truncation import cut_lengths
from autobatch.model import ModelSpec, row_flops
from autobatch.plan.epochs import Plan, PlanSettings, make_plan
from autobatch.records import Candidate


def plan_of(
    config: Config,
    candidate: Candidate,
    cache: TokenCache | ShippedSamples,
    spec: ModelSpec,
    *,
    num_ranks: int,
) -> Plan:
    """Return the plan of a run: ranks are balanced by the model's FLOPs for each row.

    Of shipped samples, which have no order, it stands for any draw.

    Raises:
        DataError: if a row is longer than max_length and truncation is `error`.
        PlanError: if the batch arithmetic has no valid cut.
    """
    data, trainer = config.data, config.trainer
    cut = cut_lengths(cache, max_length=data.max_length, truncation=data.truncation)
    return make_plan(
        PlanSettings(
            train_batch_size=data.train_batch_size,
            data_parallel_size=num_ranks,
            seed=data.seed,
            total_epochs=trainer.total_epochs,
            total_training_steps=trainer.total_training_steps,
            max_token_len_per_gpu=candidate.max_token_len_per_gpu,
            micro_batch_size_per_gpu=candidate.micro_batch_size_per_gpu,
            use_remove_padding=candidate.toggles.use_remove_padding,
            pad_to=data.pad_to,
            max_length=data.max_length,
        ),
        lengths=cut.lengths,
        label_tokens=cut.label_tokens,
        costs=row_flops(spec, cut.lengths, cut.label_tokens),
        any_draw=isinstance(cache, ShippedSamples),
    )
