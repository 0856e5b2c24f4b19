"""Each command as one Python function."""

from autobatch.api.demo_command import demo
from autobatch.api.gpus_command import GpusReport, gpus
from autobatch.api.launch_command import LaunchReport, launch
from autobatch.api.probe_command import probe
from autobatch.api.profile_command import profile
from autobatch.api.run_command import RunReport, run
from autobatch.api.tune_command import TuneReport, tune

__all__ = [
    "GpusReport",
    "LaunchReport",
    "RunReport",
    "TuneReport",
    "demo",
    "gpus",
    "launch",
    "probe",
    "profile",
    "run",
    "tune",
]
