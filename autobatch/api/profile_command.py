"""`autobatch profile`: how long the rows of a data set are, in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autobatch.api.inputs import RowProgress, absolute
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
    text_only: bool = False,
    turn_by_turn: str = "sample",
    out: str | Path = DEFAULT_OUT,
    progress: RowProgress | None = None,
) -> LengthProfile:
    """Measure token lengths, keep the ids in the token cache, and write `out`/profile.json.

    `text_only` asks for a max_length in spite of images and the like beside the text;
    `turn_by_turn` is how many conversations are rendered message by message too, to count
    those that differ: all, sample or off.

    Raises:
        AutobatchError: if files, columns or tokenizer cannot be used.
    """
    source = tokenizer or model
    if source is None:
        raise ConfigError("no tokenizer is given; name a directory by --model or --tokenizer")
    result = profile_lengths(
        [absolute(path) for path in data],
        tokenizer_dir=absolute(source),
        model=None if model is None else absolute(model),
        format=format,
        keys=keys,
        text_only=text_only,
        turn_by_turn=turn_by_turn,
        progress=progress,
    )
    write_json(make_out_dir(Path(out)) / PROFILE_FILE, result)
    return result
