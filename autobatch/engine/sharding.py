"""State over ranks and precisions: master weights that train, and the copies that compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autobatch.config import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def shard_module(module: torch.nn.Module, mesh: DeviceMesh, config: Config) -> None:
    """Shard a module's parameters that no inner module holds yet (FSDP2).

    The master weights stay in `state_dtype`; forward and backward run in `param_dtype`;
    gradients are summed over ranks in `reduce_dtype` after every micro-batch, so that no rank
    keeps a whole gradient.
    """
    engine = config.engine
    same = engine.param_dtype == engine.state_dtype
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=engine.reshard_after_forward,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=None if same else DTYPES[engine.param_dtype],
            reduce_dtype=DTYPES[engine.reduce_dtype],
        ),
    )


class MasterWeights:
    """Mixed precision on one rank without FSDP: what `shard_module` does, without its hooks.

    The module computes with copies in `param_dtype`. After each backward pass a copy's gradient
    is added to its master's, in the master's precision; `publish` refreshes the copies.
    """

    def __init__(self, module: torch.nn.Module, param_dtype: torch.dtype) -> None:
        self._copies: dict[str, torch.nn.Parameter] = {}
        self.named: dict[str, torch.nn.Parameter] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad or parameter.dtype == param_dtype:
                self.named[name] = parameter
                continue
            master = torch.nn.Parameter(parameter.data)
            parameter.data = parameter.data.to(param_dtype)
            parameter.register_post_accumulate_grad_hook(_move_gradient(master))
            self._copies[name], self.named[name] = parameter, master

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the master weights into the module."""
        if self._copies:
            torch._foreach_copy_(
                list(self._copies.values()), [self.named[name] for name in self._copies]
            )


def _move_gradient(master: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
    def move(copy: torch.Tensor) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = copy.grad.to(master.dtype)
        else:
            master.grad += copy.grad
        copy.grad = None

    return move
