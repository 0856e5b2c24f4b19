"""Write a small data set with its tokenizer, plus the config of a tiny model.

The rows are little exercises over made-up sentences. Their lengths are log-normal, like those
of real instruction data: most are short, a few are ten times as long.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from autobatch.errors import AutobatchError
from autobatch.storage import make_out_dir, write_json
from autobatch.units import round_up

NUM_ROWS = 1500
_VOCAB_SIZE = 1500  # at most; these texts run out of merges earlier
_MOST_SENTENCES = 34  # such a row has about 600 tokens
_NUM_LONG_ROWS = 3
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What makes the loss fall within 60 steps; the tiny model has no weights to start from.
_OVERRIDES = (
    "data.train_batch_size=32",
    "model.init=random",
    "engine.param_dtype=fp32",
    "optim.lr=3e-3",
    "trainer.total_training_steps=60",
)
_ADJECTIVES = (
    "amber brave bright calm clever copper cotton curious gentle golden hidden hungry ivory "
    "little lonely lucky narrow old patient purple quiet silver sleepy velvet wooden yellow"
)
_NOUNS = (
    "acorn anchor badger basket beacon camel candle dragon eagle falcon feather glacier hammer "
    "helmet kettle lantern lobster magnet monkey needle otter panther parrot pebble pigeon "
    "planet rabbit raven robin rocket sailor salmon shovel spider squirrel statue thunder tiger "
    "tractor trumpet tulip turtle umbrella violin wagon walrus willow wizard zebra"
)
_VERBS = (
    ("rests", "under"),
    ("waits", "near"),
    ("looks", "over"),
    ("walks", "behind"),
    ("sings", "above"),
    ("hides", "inside"),
)
_PLACES = "bridge canyon castle forest garden harbor island meadow palace river tunnel valley"


@dataclass(frozen=True, kw_only=True)
class DemoPaths:
    """Where the demo's files lie, with the `key=value` settings that suit them."""

    data: Path  # a parquet file with columns question, answer
    model: Path  # config.json and tokenizer, no weights
    overrides: tuple[str, ...]


def write_demo(dir: Path, *, seed: int = 0, num_rows: int = NUM_ROWS) -> DemoPaths:
    """Write rows, tokenizer, model config under a folder; the same seed writes the same files.

    Raises:
        AutobatchError: if the folder cannot be written or num_rows is below 1.
    """
    if num_rows < 1:
        raise AutobatchError(f"num_rows={num_rows} is below 1; give 1 or more")
    rows = demo_rows(seed=seed, num_rows=num_rows)
    data, model = make_out_dir(dir) / "data" / "train.parquet", dir / "model"
    try:
        data.parent.mkdir(exist_ok=True)
        model.mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), data)
        vocab_size = _write_tokenizer(model, (text for row in rows for text in row.values()))
    except OSError as error:
        raise AutobatchError(
            f"cannot write the demo under {dir}: {error.strerror or error}; choose another --out"
        ) from error
    write_json(model / "config.json", _model_config(vocab_size))
    return DemoPaths(data=data, model=model, overrides=_OVERRIDES)


def demo_rows(*, seed: int, num_rows: int) -> list[dict[str, str]]:
    """Return rows of question and answer; each answer follows from its question alone."""
    rng = random.Random(seed)
    rows = []
    for index in range(num_rows):
        if index < _NUM_LONG_ROWS and num_rows > 10 * _NUM_LONG_ROWS:
            num_sentences = _MOST_SENTENCES - 3 * index
        else:
            num_sentences = round(rng.lognormvariate(0.7, 0.75))
            num_sentences = min(max(num_sentences, 1), _MOST_SENTENCES // 2)
        rows.append(_exercise(rng, [_sentence(rng) for _ in range(num_sentences)]))
    rng.shuffle(rows)
    return rows


def _sentence(rng: random.Random) -> str:
    adjectives = rng.choices(_ADJECTIVES.split(), k=rng.choice((0, 0, 1, 1, 2, 4)))
    verb, where = rng.choice(_VERBS)
    return " ".join(
        [
            "the",
            *adjectives,
            rng.choice(_NOUNS.split()),
            verb,
            where,
            "the",
            rng.choice(_PLACES.split()) + ".",
        ]
    )


def _exercise(rng: random.Random, sentences: list[str]) -> dict[str, str]:
    text = " ".join(sentences)
    kind = rng.randrange(4)
    if kind == 0:
        return {"question": f"Repeat: {text}", "answer": text}
    if kind == 1:
        return {"question": f"Replace the by a: {text}", "answer": text.replace("the ", "a ")}
    if kind == 2:
        return {
            "question": f"Write these sentences in reverse order: {text}",
            "answer": " ".join(reversed(sentences)),
        }
    first, second = rng.randrange(10), rng.randrange(10)
    numbered = " ".join(f"{number}: {one}" for number, one in enumerate(sentences, 1))
    return {
        "question": f"Number these sentences, then add {first} and {second}: {text}",
        "answer": f"{numbered} The sum of {first} and {second} is {first + second}.",
    }


def _write_tokenizer(directory: Path, texts: Iterable[str]) -> int:
    """Train a byte-level BPE, save it in Hugging Face's layout; return its number of entries."""
    from transformers import PreTrainedTokenizerFast  # a second: not paid by `--help`

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts, "system user assistant"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials[2], pad_token=specials[0]
    )
    fast.chat_template = _CHATML
    fast.save_pretrained(str(directory))
    return len(fast)


def _model_config(num_tokens: int) -> dict[str, Any]:
    """Return the config of a Qwen2 with about a million parameters, in Hugging Face's words."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-06,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": False,
        "vocab_size": round_up(num_tokens, 64),
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
