"""Rules about files and what of them this version trains on."""

from __future__ import annotations

from collections.abc import Iterator

from autobatch.config import Config
from autobatch.preflight.rule import Finding, refuse


def check_data(config: Config, *, needs_files: bool = True) -> Iterator[Finding]:
    """Look at the data section alone; rows were read by `profile`."""
    data = config.data
    shipped = (config.tuning or {}).get("profile")
    if shipped and not data.train_files:
        yield refuse(
            "no_train_files",
            f"the config was tuned on the shipped lengths of {shipped} and names no data; give "
            "the files to train on, data.train_files=[train.parquet]",
        )
    elif needs_files and not data.train_files:
        yield refuse(
            "no_train_files",
            "data.train_files is empty; name the files, e.g. data.train_files=[train.parquet], "
            "or run `autobatch profile DATA --model MODEL` first",
        )
    if data.val_files or data.val_fraction:
        yield refuse(
            "no_evaluation",
            "data.val_files and data.val_fraction do not work in this version; leave them out",
        )
    if config.trainer.test_freq > 0:
        yield refuse(
            "no_evaluation_steps",
            f"trainer.test_freq={config.trainer.test_freq} asks for evaluation, which this "
            "version does not have; leave it out",
        )
