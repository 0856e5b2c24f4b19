"""Every test has a token cache of its own; GPU tests are skipped where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is imported: tests run side by side, one core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(autouse=True, scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory):
    """Keep the user's cache out of the tests."""
    patch = pytest.MonkeyPatch()
    patch.setenv("AUTOBATCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests without a CUDA device; torch is asked only if there are any."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not Path("/dev/nvidiactl").exists():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
