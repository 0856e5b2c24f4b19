"""The records that stages hand to one another: frozen, with units in their names.

A later stage adds a record; it never rewrites an earlier one. What can be derived
is a function beside the record, and is added when a record is printed.
"""

from autobatch.records.lengths import (
    SCHEMA_VERSION,
    DataSource,
    LengthProfile,
    LengthStats,
    LongRow,
    MaxLengthAdvice,
    MaxLengthOption,
    PaddingFraction,
    ProfileOrigin,
    ProfileWarning,
    RowPlace,
    SampledRows,
    TokenizerFacts,
    TurnByTurn,
)
from autobatch.records.trials import (
    Candidate,
    Certificate,
    GpuSpec,
    Load,
    ModelSpec,
    Toggles,
    Trial,
    WorstMicroBatch,
    fits,
)

__all__ = [
    "SCHEMA_VERSION",
    "Candidate",
    "Certificate",
    "DataSource",
    "GpuSpec",
    "LengthProfile",
    "LengthStats",
    "Load",
    "LongRow",
    "MaxLengthAdvice",
    "MaxLengthOption",
    "ModelSpec",
    "PaddingFraction",
    "ProfileOrigin",
    "ProfileWarning",
    "RowPlace",
    "SampledRows",
    "Toggles",
    "TokenizerFacts",
    "Trial",
    "TurnByTurn",
    "WorstMicroBatch",
    "fits",
]
