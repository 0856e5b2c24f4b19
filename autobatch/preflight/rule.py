"""What a rule finds, and how findings stop a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autobatch.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding of a rule: a sentence with the value, the rule and the next move."""

    id: str
    message: str
    refuses: bool  # False: a warning


def refuse(rule_id: str, message: str) -> Finding:
    """Return a finding that stops the run."""
    return Finding(id=rule_id, message=message, refuses=True)


def warn(rule_id: str, message: str) -> Finding:
    """Return a finding that is only told."""
    return Finding(id=rule_id, message=message, refuses=False)


def warnings_or_raise(findings: Iterable[Finding]) -> list[Finding]:
    """Return the warnings.

    Raises:
        ConfigError: with every refusing finding, one sentence each.
    """
    found = list(findings)
    refused = [finding.message for finding in found if finding.refuses]
    if refused:
        raise ConfigError("\n".join(refused))
    return found
