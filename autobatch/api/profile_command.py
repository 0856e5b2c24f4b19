"""`autobatch profile`: how long the rows of a data set are, in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from autobatch.api.inputs import RowProgress, Talk, absolute
from autobatch.dataset.profiling import profile_lengths
from autobatch.errors import ConfigError
from autobatch.hardware.environment import describe
from autobatch.records import LengthProfile
from autobatch.reporting import Origin, draw_profile, remove_drawings
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
    pictures: bool = True,
    command: str | None = None,
    talk: Talk | None = None,
) -> LengthProfile:
    """Measure token lengths, keep the ids in the token cache, and write `out`/profile.json.

    `pictures` draws profile.png and profile.html beside it, else old ones are removed;
    `command` is what the user typed. `talk` is told what could not be drawn.

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
        progress=progress,
    )
    folder = make_out_dir(Path(out))
    write_json(folder / PROFILE_FILE, result)
    if pictures:
        draw_profile(result, folder, origin=_origin(command), say=talk or (lambda words: None))
    else:
        remove_drawings(folder)
    return result


def _origin(command: str | None) -> Origin:
    names = ("autobatch", "python", "transformers", "tokenizers")
    here = describe(device="cpu")
    return Origin(
        command=command,
        date=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        versions={name: None if here.get(name) is None else str(here[name]) for name in names},
    )
