"""The optimizer, with its learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from autobatch.config.schema import OptimConfig


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimConfig
) -> torch.optim.AdamW:
    """Return fused AdamW: the other forms allocate temporaries at the memory peak."""
    return torch.optim.AdamW(
        [p for p in parameters if p.requires_grad],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(step: int, *, num_steps: int, config: OptimConfig) -> float:
    """Return the learning rate of an optimizer step, counted from 0.

    Warm-up rises linearly over ceil(warmup_steps_ratio * num_steps) steps and its first step is
    not zero; then `cosine` and `linear` fall to zero after the last step.
    """
    warmup = math.ceil(config.warmup_steps_ratio * num_steps)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, num_steps - warmup)
    if config.lr_scheduler == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_scheduler == "linear":
        return config.lr * (1 - progress)
    return config.lr
