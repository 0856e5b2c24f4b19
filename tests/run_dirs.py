"""Small complete inputs of a run: data, tokenizer, model, config."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml
from tiny import train_tokenizer, write_parquet
from tiny_model import tiny_model


def small_rows(num_rows: int, *, seed: int = 0) -> list[dict[str, str]]:
    """Return question/answer rows of very different lengths."""
    rng = random.Random(seed)
    words = ["two", "plus", "four", "clips", "user", "answer", "question", "april", "friends"]

    def text(most: int) -> str:
        return " ".join(rng.choice(words) for _ in range(1 + int(most * rng.random() ** 3)))

    return [{"question": text(20), "answer": text(40)} for _ in range(num_rows)]


def small_run(
    directory: Path, *, num_rows: int = 48, kind: str = "qwen2", **values: Any
) -> tuple[Path, Path, Path]:
    """Write data, model and an untuned config; return their paths. `a__b` sets key `a.b`."""
    directory.mkdir(parents=True, exist_ok=True)
    data = Path(write_parquet(directory / "train.parquet", small_rows(num_rows)))
    model = tiny_model(directory / "model", kind, vocab_size=640, max_position_embeddings=512)
    train_tokenizer(model)
    settings: dict[str, dict[str, Any]] = {
        "data": {
            "train_files": [str(data)],
            "train_batch_size": 12,
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": 256,
        },
        "model": {"path": str(model), "init": "random"},
        "engine": {"param_dtype": "fp32"},
        "optim": {"lr": 1e-3},
        "trainer": {
            "device": "cpu",
            "output_dir": str(directory / "run"),
            "total_epochs": 2,
            "nproc_per_node": 1,
        },
    }
    for name, value in values.items():
        section, key = name.split("__")
        settings.setdefault(section, {})[key] = value
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    return data, model, config
