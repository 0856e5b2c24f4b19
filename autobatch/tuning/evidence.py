"""The evidence below the settings of a tuned config, read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autobatch.config import Config
from autobatch.errors import AutobatchError, ConfigError
from autobatch.records import Certificate, Trial, fits
from autobatch.storage import from_plain


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a verdict rests on."""

    winner: Trial
    certificate: Certificate
    memory_limit_bytes: int
    law_key: Mapping[str, Any]


def read_evidence(config: Config) -> Evidence | None:
    """Return the evidence of a tuned config, None if it was never tuned.

    Raises:
        ConfigError: if the section was damaged or edited by hand.
    """
    if config.tuning is None:
        return None
    try:
        evidence = from_plain(Evidence, config.tuning, where="tuning")
        if not isinstance(evidence.law_key, Mapping):
            raise AutobatchError(f"tuning: law_key is {evidence.law_key!r}, not a mapping")
        if not evidence.winner.load.micro_batches:
            raise AutobatchError("tuning: winner.load has no micro-batch")
        if evidence.memory_limit_bytes < 1:
            raise AutobatchError(f"tuning: memory_limit_bytes={evidence.memory_limit_bytes}")
        fits(evidence.winner)
    except (AutobatchError, AssertionError, TypeError) as error:
        words = str(error) or "tuning: winner lacks its peaks"
        raise ConfigError(
            f"{words}; the evidence of a tuned config is not for editing, so run `autobatch tune` "
            "again"
        ) from error
    return evidence
