"""Rules about processes, ports and the place of the run."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from autobatch.config import Config
from autobatch.errors import StaleError
from autobatch.preflight.rule import Finding, refuse, warn


def check_run(
    config: Config, run_dir: Path, *, num_cores: int, num_gpus: int, torchrun_args: Sequence[str]
) -> Iterator[Finding]:
    """Look at the device, the ranks, the ports asked for, the output directory.

    Raises:
        StaleError: if the config was tuned for more GPUs than are here.
    """
    ranks = config.trainer.nproc_per_node
    if config.tuning is not None and config.trainer.device == "cuda" and ranks > num_gpus:
        raise StaleError(
            f"the tuned config is stale: trainer.nproc_per_node={ranks} is above the {num_gpus} "
            f"GPUs visible here; run `autobatch tune --num-gpus {max(1, num_gpus)}` for what is "
            "here, or look at CUDA_VISIBLE_DEVICES"
        )
    if config.trainer.device == "cuda" and ranks > num_gpus:
        yield refuse(
            "more_ranks_than_gpus",
            f"trainer.nproc_per_node={ranks} is above the {num_gpus} GPUs visible here; tune for "
            f"what is here (--num-gpus {max(1, num_gpus)}), or use trainer.device=cpu",
        )
    if config.trainer.device == "cpu" and ranks > num_cores:
        yield warn(
            "more_ranks_than_cores",
            f"trainer.nproc_per_node={ranks} is above the {num_cores} cores here; "
            "ranks will wait for one another",
        )
    if config.engine.strategy == "single" and ranks * config.trainer.nnodes > 1:
        yield refuse(
            "single_with_ranks",
            f"engine.strategy=single serves one rank, not {ranks * config.trainer.nnodes}; "
            "use engine.strategy=fsdp2",
        )
    yield from _check_port(torchrun_args)
    parent = next(path for path in [run_dir, *run_dir.absolute().parents] if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        yield refuse(
            "output_dir",
            f"trainer.output_dir={run_dir} cannot be made in {parent}; choose another one",
        )


def _check_port(torchrun_args: Sequence[str]) -> Iterator[Finding]:
    """Refuse a port that the user fixed on this host and that something else holds."""
    options = dict(_options(torchrun_args))
    endpoint = options.get("rdzv-endpoint", "")
    host = options.get("master-addr") or endpoint.partition(":")[0] or "127.0.0.1"
    port = options.get("master-port") or endpoint.partition(":")[2]
    local = ("127.0.0.1", "localhost", "0.0.0.0", socket.gethostname())
    if not port or int(options.get("node-rank") or 0) != 0 or host not in local:
        return
    if not port.isdigit() or not 0 < int(port) < 2**16:
        yield refuse("port", f"port {port!r} is no port; give a number from 1 to 65535")
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host if host != socket.gethostname() else "", int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                yield refuse(
                    "port_taken",
                    f"{host}:{port} is taken by another program; choose another port, or leave "
                    "it out on one node and a free one is taken",
                )


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for position, argument in enumerate(arguments):
        name, equals, value = argument.lstrip("-").partition("=")
        if argument.startswith("--"):
            if not equals and position + 1 < len(arguments):
                value = arguments[position + 1]
            yield name.replace("_", "-"), value
