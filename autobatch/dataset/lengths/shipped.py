"""Length profiles of known data sets, shipped with the tool: lengths without rows."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import numpy as np

from autobatch.errors import ConfigError, DataError
from autobatch.records import LengthProfile
from autobatch.storage import read_record, shipped_dir


@dataclass(frozen=True, kw_only=True)
class ShippedSamples:
    """Samples of which the lengths are all that is known: every token counts as a label."""

    lengths: np.ndarray  # int64 (num_samples,), ascending, uncut
    labels: np.ndarray  # uint8 (all tokens,): ones, in no memory

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return len(self.lengths)

    @property
    def label_tokens(self) -> np.ndarray:
        """int64 (num_samples,), uncut: an upper bound."""
        return self.lengths

    @property
    def starts(self) -> np.ndarray:
        """int64 (num_samples,): where each sample starts in `labels`."""
        return np.cumsum(self.lengths) - self.lengths


def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped profiles, sorted.

    Raises:
        AutobatchError: if the folder is missing.
    """
    return tuple(sorted(path.stem for path in shipped_dir("lengths").glob("*.json")))


def shipped_profile(name: str) -> LengthProfile:
    """Return the shipped profile of a name such as `gsm8k`; case is ignored.

    Raises:
        ConfigError: if there is none, with the nearest name and all of them.
        AutobatchError: if it is damaged.
    """
    names = shipped_names()
    if name.lower() in names:
        return read_record(LengthProfile, shipped_dir("lengths") / f"{name.lower()}.json")
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"profile {name!r} is neither a file nor a shipped profile; {hint}shipped are "
        f"{', '.join(names)}; or measure yours with `autobatch profile DATA --model MODEL`"
    )


def samples_of(profile: LengthProfile) -> ShippedSamples:
    """Return the samples that a profile's histogram counts.

    Raises:
        DataError: if the counts are not those of the profile's samples.
    """
    values, counts = np.array(profile.histogram, dtype=np.int64).reshape(-1, 2).T
    if (
        not len(values)
        or min(values.min(), counts.min()) < 1
        or (int(counts.sum()), int(values.max())) != (profile.num_samples, profile.length.max)
    ):
        raise DataError(
            f"the shipped profile's histogram does not count its {profile.num_samples} samples; "
            "the file was changed: install autobatch-sft again"
        )
    lengths = np.repeat(values, counts)
    return ShippedSamples(
        lengths=lengths, labels=np.broadcast_to(np.uint8(1), (int(lengths.sum()),))
    )
