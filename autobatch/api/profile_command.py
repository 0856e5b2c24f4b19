"""`autobatch profile`: how long the rows of a data set are, in tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from autobatch.api.inputs import RowProgress, Talk, data_name, model_dir
from autobatch.dataset.lengths.interrupting import ProfileInterrupted
from autobatch.dataset.lengths.profiling import profile_lengths
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
    text_only: bool = False,
    turn_by_turn: str = "sample",
    sample: int | None = None,
    out: str | Path = DEFAULT_OUT,
    progress: RowProgress | None = None,
    pictures: bool = True,
    command: str | None = None,
    talk: Talk | None = None,
) -> LengthProfile:
    """Measure token lengths, keep the ids in the token cache, and write `out`/profile.json.

    With `sample` only about so many rows are read, and the profile estimates the whole.
    `pictures` draws profile.png and profile.html beside it, else old ones are removed;
    `command` is what the user typed. `talk` is told what could not be drawn.
    `text_only` asks for a max_length in spite of images and the like beside the text;
    `turn_by_turn` is how many conversations are rendered message by message too, to count
    those that differ: all, sample or off.

    Raises:
        ProfileInterrupted: on an interrupt; the profile of the rows done is written then too.
        AutobatchError: if files, columns or tokenizer cannot be used.
    """
    source = tokenizer or model
    if source is None:
        raise ConfigError(
            "no tokenizer is given; name a directory, or a model of the Hub, by --model or "
            "--tokenizer"
        )
    folder = None if model is None else model_dir(model)
    try:
        result = profile_lengths(
            [data_name(name) for name in data],
            tokenizer_dir=folder if folder and source == model else model_dir(source),
            model=folder,
            format=format,
            keys=keys,
            text_only=text_only,
            turn_by_turn=turn_by_turn,
            sample=sample,
            progress=progress,
        )
    except ProfileInterrupted as interrupt:
        write_json(make_out_dir(Path(out)) / PROFILE_FILE, interrupt.profile)
        remove_drawings(Path(out))
        raise
    out_dir = make_out_dir(Path(out))
    write_json(out_dir / PROFILE_FILE, result)
    if pictures:
        draw_profile(result, out_dir, origin=_origin(command), say=talk or (lambda words: None))
    else:
        remove_drawings(out_dir)
    return result


def _origin(command: str | None) -> Origin:
    names = ("autobatch", "python", "transformers", "tokenizers")
    here = describe(device="cpu")
    return Origin(
        command=command,
        date=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        versions={name: None if here.get(name) is None else str(here[name]) for name in names},
    )
