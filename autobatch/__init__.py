"""autobatch: measured batch settings for fine-tuning language models."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "launch", "probe", "profile", "run", "tune"]


def __getattr__(name: str) -> Any:
    """Load the functions of `autobatch.api` when they are asked for."""
    if name in __all__:
        from autobatch import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
