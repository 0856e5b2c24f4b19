"""What a measurement runs on: versions, processor, card, the variables its processes get."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import autobatch
from autobatch.errors import ConfigError
from autobatch.hardware.limit import CGROUP_ROOT, SELF_CGROUP, cgroup_folders
from autobatch.hardware.present import Nvml, driver_version, present_gpus

# torch 2.13 reads the first name, older ones the second; one release read only the second
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CPUINFO = Path("/proc/cpuinfo")
# torch older than pytorch/pytorch#161749 refuses trainer.deterministic without a fixed workspace
# (checked 2026-12-01); the workspace takes memory, so probes get it too
_CUBLAS_VARIABLE, _CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_DISTRIBUTIONS = ("torch", "transformers", "tokenizers", "liger-kernel", "peft")


def describe(*, device: str, nvml: Nvml | None = None) -> dict[str, str | int | None]:
    """Return the environment that a record carries; what is absent is None.

    `gpu`, `driver` and `allocator` are told for the device cuda: the first visible card's own
    name, its driver, the allocator setting that every process is given.

    Raises:
        ConfigError: if the user's allocator setting cannot be read.
    """
    on_cuda = device == "cuda"
    cards = present_gpus(nvml=nvml) if on_cuda else ()
    return {
        "device": device,
        "gpu": cards[0].vendor_name if cards else None,
        "driver": driver_version(nvml=nvml) if on_cuda else None,
        "allocator": allocator_environment()[ALLOCATOR_VARIABLES[0]] if on_cuda else None,
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

    Probe and training use the same: a step's speed and bits depend on the number of threads, so
    no library may change it while it runs.
    Idle threads sleep instead of spinning: one busy neighbour on a core otherwise stalls every
    operation (measured on 2 cores, torch 2.13 CPU, 2026-12-01: 11.2 s against 1.8 s for
    SmolLM2-135M, 256 tokens in bf16, under a load average of 2.6).
    """
    values = {
        "OMP_NUM_THREADS": str(max(1, num_cores() // num_local_ranks)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
    }
    return {name: value for name, value in values.items() if name not in os.environ}


def child_environment(num_local_ranks: int, *, device: str) -> dict[str, str]:
    """Return the variables that each process of a probe or a training gets, the same for both.

    Its children inherit them. They import this very package, wherever it was imported from, and
    no file of the folder that the user stands in. What the user set for threads stays.

    Raises:
        ConfigError: if the user's allocator setting cannot be read.
    """
    own = str(Path(__file__).parent.parent.parent)
    values = {
        **thread_environment(num_local_ranks),
        **allocator_environment(),
        "PYTHONPATH": os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH")))),
        "PYTHONSAFEPATH": "1",
    }
    if device == "cuda" and _CUBLAS_VARIABLE not in os.environ:
        values[_CUBLAS_VARIABLE] = _CUBLAS_WORKSPACE
    return values


def allocator_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return torch's allocator setting under both of its names: ours, then the user's over it.

    A setting counts only when it stands before torch is imported, so each child gets it with
    its environment. Where the user set both names, the new one wins.

    Raises:
        ConfigError: if a part of the user's setting is no `key:value`.
    """
    settings = os.environ if environ is None else environ
    merged = {"expandable_segments": "True"}
    for variable in reversed(ALLOCATOR_VARIABLES):
        # a comma inside brackets belongs to a value: roundup_power2_divisions:[256:1,>:8]
        for part in re.split(r",(?![^\[]*\])", settings.get(variable, "")):
            key, colon, value = ("".join(word.split()) for word in part.partition(":"))
            if key and value:
                merged[key] = value
            elif key or colon:
                raise ConfigError(
                    f"{variable} has {part.strip()!r}, which is no key:value; write it as "
                    "expandable_segments:True,max_split_size_mb:512, or unset it"
                )
    text = ",".join(f"{key}:{value}" for key, value in merged.items())
    return dict.fromkeys(ALLOCATOR_VARIABLES, text)
