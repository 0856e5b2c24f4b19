"""The config of a run: schema, loading, overriding, and its candidate."""

from autobatch.config.candidates import (
    candidate_of,
    candidate_values,
    default_attention,
    toggles_of,
)
from autobatch.config.loading import (
    load_config,
    overridden_keys,
    resolve,
    save_config,
    with_values,
)
from autobatch.config.schema import SIZE_KEYS, TOGGLE_KEYS, TUNABLE_KEYS, Config

__all__ = [
    "SIZE_KEYS",
    "TOGGLE_KEYS",
    "TUNABLE_KEYS",
    "Config",
    "candidate_of",
    "candidate_values",
    "default_attention",
    "load_config",
    "overridden_keys",
    "resolve",
    "save_config",
    "toggles_of",
    "with_values",
]
