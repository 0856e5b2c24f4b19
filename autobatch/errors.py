"""The errors a user can meet; each carries one plain sentence and an exit code."""

from __future__ import annotations


class AutobatchError(Exception):
    """Say in one sentence the value, the rule and the next move; end with `exit_code`.

    Exit codes (a contract): 1 our error, 3 nothing fits, 4 stale.
    """

    exit_code = 1


class ConfigError(AutobatchError):
    """A setting, key or flag has a value that cannot work."""


class DataError(AutobatchError):
    """A data file, column or row cannot be used."""


class ModelError(AutobatchError):
    """A model or tokenizer directory cannot be used."""


class PlanError(AutobatchError):
    """The batch arithmetic has no valid cut."""


class RunError(AutobatchError):
    """A child process failed; the message carries its own words."""


class NothingFitsError(AutobatchError):
    """No candidate stays within the memory limit."""

    exit_code = 3


class StaleError(AutobatchError):
    """A tuned config no longer describes what is here."""

    exit_code = 4
