"""Child process trees that never outlive their launcher (Linux)."""

from autobatch.jobs.endings import Ending
from autobatch.jobs.job import Job, free_port, start_process, start_ranks
from autobatch.jobs.locks import exclusive
from autobatch.jobs.processes import end_with_launcher

__all__ = [
    "Ending",
    "Job",
    "end_with_launcher",
    "exclusive",
    "free_port",
    "start_process",
    "start_ranks",
]
