"""What a measurement ran on: versions, processor, cores."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from pathlib import Path

import autobatch
from autobatch.hardware.limit import CGROUP_ROOT, SELF_CGROUP, cgroup_folders

CPUINFO = Path("/proc/cpuinfo")
_DISTRIBUTIONS = ("torch", "transformers", "tokenizers", "liger-kernel", "peft")


def describe(*, device: str) -> dict[str, str | int | None]:
    """Return the environment that a record carries; a package that is absent is None."""
    return {
        "device": device,
        "autobatch": autobatch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "num_cores": num_cores(),
        **{name.replace("-", "_"): _version(name) for name in _DISTRIBUTIONS},
    }


def cpu_name(*, cpuinfo: Path = CPUINFO) -> str | None:
    """Return the processor's own name, else its architecture, None if neither is told."""
    try:
        lines = cpuinfo.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name") and ":" in line:
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine() or None


def num_cores(*, self_cgroup: Path = SELF_CGROUP, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Return the cores this process may use: affinity, at most a container's quota rounded up."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for folder in cgroup_folders("cpu", self_cgroup=self_cgroup, cgroup_root=cgroup_root):
        quota = _quota_cores(folder)
        if quota is not None:
            cores = min(cores, max(1, math.ceil(quota)))
    return cores


def _quota_cores(folder: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
        except OSError:
            continue
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            return int(words[0]) / int(words[1])  # "max" and -1 are no quota
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def thread_environment(num_local_ranks: int) -> dict[str, str]:
    """Return the variables that share the cores among ranks; what the user set stays.

    Probe and training use the same: a step's speed and bits depend on the number of threads.
    Idle threads sleep instead of spinning: one busy neighbour on a core otherwise stalls every
    operation (measured on 2 cores, torch 2.13 CPU, 2026-12-01: 11.2 s against 1.8 s for
    SmolLM2-135M, 256 tokens in bf16, under a load average of 2.6).
    """
    values = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // num_local_ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {name: value for name, value in values.items() if name not in os.environ}
