"""The memory limit on the CPU is what the container leaves, shared by ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autobatch.errors import ConfigError
from autobatch.hardware import environment, limit
from autobatch.hardware.environment import num_cores, thread_environment

MIB = 2**20


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _available(root: Path, *, mem_available_kib: int, cgroup: str) -> int:
    meminfo = f"MemTotal: 99999999 kB\nMemAvailable:  {mem_available_kib} kB\n"
    return limit.available_memory_bytes(
        meminfo=_write(root / "meminfo", meminfo),
        self_cgroup=_write(root / "self", cgroup),
        cgroup_root=root / "fs",
    )


def _version_2(folder: Path, *, limit_text: str, usage: int, cache: int = 0) -> None:
    _write(folder / "memory.max", f"{limit_text}\n")
    _write(folder / "memory.current", f"{usage}\n")
    _write(folder / "memory.stat", f"anon 1\ninactive_file {cache}\nactive_file 7\n")


def test_without_a_container_limit_the_host_decides(tmp_path: Path) -> None:
    """A control group that says `max` limits nothing."""
    _version_2(tmp_path / "fs/a", limit_text="max", usage=5)
    assert _available(tmp_path, mem_available_kib=1000, cgroup="0::/a\n") == 1024 * 1000


def test_version_2_limit_counts_inactive_cache_as_free(tmp_path: Path) -> None:
    """limit - usage + inactive file cache."""
    _version_2(tmp_path / "fs/a/b", limit_text=str(100 * MIB), usage=60 * MIB, cache=10 * MIB)
    assert _available(tmp_path, mem_available_kib=10**9, cgroup="0::/a/b\n") == 50 * MIB


def test_the_tightest_group_up_the_tree_decides(tmp_path: Path) -> None:
    """A parent's limit binds its children."""
    _version_2(tmp_path / "fs/a/b", limit_text="max", usage=1)
    _version_2(tmp_path / "fs/a", limit_text=str(30 * MIB), usage=10 * MIB)
    assert _available(tmp_path, mem_available_kib=10**9, cgroup="0::/a/b\n") == 20 * MIB


def test_a_path_hidden_by_the_mount_falls_back_to_its_root(tmp_path: Path) -> None:
    """Inside a container the root of the mount is the container itself."""
    _version_2(tmp_path / "fs", limit_text=str(8 * MIB), usage=2 * MIB)
    assert _available(tmp_path, mem_available_kib=10**9, cgroup="0::/docker/abc\n") == 6 * MIB


def test_version_1_limit_is_read(tmp_path: Path) -> None:
    """Version 1 has its own file names below its own mount."""
    folder = tmp_path / "fs/memory/job"
    _write(folder / "memory.limit_in_bytes", str(64 * MIB))
    _write(folder / "memory.usage_in_bytes", str(20 * MIB))
    _write(folder / "memory.stat", f"inactive_file 1\ntotal_inactive_file {4 * MIB}\n")
    cgroup = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    assert _available(tmp_path, mem_available_kib=10**9, cgroup=cgroup) == 48 * MIB


def test_a_group_over_its_limit_has_no_room(tmp_path: Path) -> None:
    """The room is never negative."""
    _version_2(tmp_path / "fs", limit_text="10", usage=50)
    assert _available(tmp_path, mem_available_kib=10**9, cgroup="0::/\n") == 0


def test_unknown_memory_is_said(tmp_path: Path) -> None:
    """Without any source the limit must be given, not guessed."""
    with pytest.raises(ConfigError, match="give --memory-limit"):
        limit.available_memory_bytes(
            meminfo=tmp_path / "none", self_cgroup=tmp_path / "none", cgroup_root=tmp_path
        )


def test_this_machine_has_memory() -> None:
    """The real files are understood."""
    assert limit.available_memory_bytes() > 0


def test_ranks_share_what_is_available() -> None:
    """available // ranks - headroom."""
    assert (
        limit.cpu_memory_limit(
            num_local_ranks=3, memory_limit_bytes=None, headroom_bytes=3, available_bytes=100
        )
        == 33 - 3
    )


def test_the_limit_asked_for_is_per_process() -> None:
    """A smaller limit is taken as it is; exactly the share is allowed."""
    for asked in (7, 50):
        assert asked == limit.cpu_memory_limit(
            num_local_ranks=2, memory_limit_bytes=asked, available_bytes=100
        )


@pytest.mark.parametrize(
    ("asked", "headroom", "words"),
    [(None, 50, "leaves nothing"), (0, 0, "not positive")],
)
def test_an_impossible_limit_is_refused(asked: int | None, headroom: int, words: str) -> None:
    """One sentence, with the next move."""
    with pytest.raises(ConfigError, match=words) as caught:
        limit.cpu_memory_limit(
            num_local_ranks=2,
            memory_limit_bytes=asked,
            headroom_bytes=headroom,
            available_bytes=100,
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("quota", "cores"), [("150000 100000", 2), ("50000 100000", 1), ("max 100000", None)]
)
def test_cores_obey_the_container(tmp_path: Path, quota: str, cores: int | None) -> None:
    """A quota is rounded up to whole cores; `max` leaves the affinity."""
    _write(tmp_path / "fs/cpu.max", quota)
    groups = _write(tmp_path / "self", "0::/\n")
    here = environment.num_cores(self_cgroup=tmp_path / "none")
    expected = here if cores is None else min(here, cores)
    assert expected == environment.num_cores(self_cgroup=groups, cgroup_root=tmp_path / "fs")


def test_cores_obey_a_version_1_quota(tmp_path: Path) -> None:
    """A quota of -1 is none; a quota below one core still leaves one."""
    _write(tmp_path / "fs/cpu/job/cpu.cfs_quota_us", "10000")
    _write(tmp_path / "fs/cpu/job/cpu.cfs_period_us", "100000")
    _write(tmp_path / "fs/cpu/cpu.cfs_quota_us", "-1")
    _write(tmp_path / "fs/cpu/cpu.cfs_period_us", "100000")
    groups = _write(tmp_path / "self", "1:cpu:/job\n")
    assert environment.num_cores(self_cgroup=groups, cgroup_root=tmp_path / "fs") == 1


def test_processor_name_is_read(tmp_path: Path) -> None:
    """The kernel's model name, without spaces around it."""
    cpuinfo = _write(tmp_path / "cpuinfo", "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert environment.cpu_name(cpuinfo=cpuinfo) == "Some CPU @ 2 GHz"


def test_environment_is_described_without_torch() -> None:
    """Versions come from package metadata: no parent imports torch for them."""
    script = (
        "import sys; from autobatch.hardware import environment as e;"
        "d = e.describe(device='cpu'); assert 'torch' in d and d['device'] == 'cpu';"
        "assert d['autobatch'] and d['python'] and d['num_cores'] >= 1 and 'liger_kernel' in d;"
        "sys.exit('torch' in sys.modules)"
    )
    repo = Path(__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", script], cwd=repo, timeout=60).returncode == 0


def test_ranks_share_the_cores_and_the_user_s_choice_stays(monkeypatch):
    """Idle threads sleep; a variable that is set is left alone."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    expected = {
        "OMP_NUM_THREADS": str(num_cores()),
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
    }
    assert expected == thread_environment(1)
    assert "1" == thread_environment(10_000)["OMP_NUM_THREADS"]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert set(expected) - {"OMP_NUM_THREADS"} == set(thread_environment(1))
