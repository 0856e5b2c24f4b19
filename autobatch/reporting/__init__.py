"""Records shown to people, in a terminal or a pipe."""

from autobatch.reporting.cards import named_gpus_table, present_gpus_table
from autobatch.reporting.drawing import draw_profile, remove_drawings
from autobatch.reporting.page import Origin
from autobatch.reporting.pictures import LengthHistogram, profile_table
from autobatch.reporting.progress import (
    MetricsTail,
    ProfileProgress,
    RunProgress,
)
from autobatch.reporting.sources import read_metrics, read_tuned
from autobatch.reporting.tables import (
    as_text,
    describe_toggles,
    run_table,
    show,
    trial_line,
    trials_table,
    tuned_summary,
)

__all__ = [
    "LengthHistogram",
    "MetricsTail",
    "Origin",
    "ProfileProgress",
    "RunProgress",
    "as_text",
    "describe_toggles",
    "draw_profile",
    "named_gpus_table",
    "present_gpus_table",
    "profile_table",
    "read_metrics",
    "read_tuned",
    "remove_drawings",
    "run_table",
    "show",
    "trial_line",
    "trials_table",
    "tuned_summary",
]
