"""`autobatch profile`: how long the rows of a data set are, in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autobatch.api.inputs import RowProgress, absolute
from autobatch.dataset.interrupting import ProfileInterrupted
from autobatch.dataset.profiling import profile_lengths
from autobatch.errors import ConfigError
from autobatch.records import LengthProfile
from autobatch.storage import DEFAULT_OUT, PROFILE_FILE, make_out_dir, write_json


def profile(
    data: Sequence[str],
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    format: str = "auto",
    keys: Mapping[str, str] | None = None,
    sample: int | None = None,
    out: str | Path = DEFAULT_OUT,
    progress: RowProgress | None = None,
) -> LengthProfile:
    """Measure token lengths, keep the ids in the token cache, and write `out`/profile.json.

    With `sample` only about so many rows are read, and the profile estimates the whole.

    Raises:
        ProfileInterrupted: on an interrupt; the profile of the rows done is written then too.
        AutobatchError: if files, columns or tokenizer cannot be used.
    """
    source = tokenizer or model
    if source is None:
        raise ConfigError("no tokenizer is given; name a directory by --model or --tokenizer")
    try:
        result = profile_lengths(
            [absolute(path) for path in data],
            tokenizer_dir=absolute(source),
            model=None if model is None else absolute(model),
            format=format,
            keys=keys,
            sample=sample,
            progress=progress,
        )
    except ProfileInterrupted as interrupt:
        write_json(make_out_dir(Path(out)) / PROFILE_FILE, interrupt.profile)
        raise
    write_json(make_out_dir(Path(out)) / PROFILE_FILE, result)
    return result
