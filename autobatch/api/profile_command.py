"""`autobatch profile`: how long the rows of a data set are, in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autobatch.api.inputs import RowProgress, data_name, model_dir
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
    out: str | Path = DEFAULT_OUT,
    progress: RowProgress | None = None,
) -> LengthProfile:
    """Measure token lengths, keep the ids in the token cache, and write `out`/profile.json.

    Raises:
        AutobatchError: if files, columns or tokenizer cannot be used.
    """
    source = tokenizer or model
    if source is None:
        raise ConfigError(
            "no tokenizer is given; name a directory, or a model of the Hub, by --model or "
            "--tokenizer"
        )
    folder = None if model is None else model_dir(model)
    result = profile_lengths(
        [data_name(name) for name in data],
        tokenizer_dir=folder if folder and source == model else model_dir(source),
        model=folder,
        format=format,
        keys=keys,
        progress=progress,
    )
    write_json(make_out_dir(Path(out)) / PROFILE_FILE, result)
    return result
