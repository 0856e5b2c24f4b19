"""tiktoken gives the ids of `tokenizers`, or is not asked."""

from __future__ import annotations

import json
import os
import unicodedata
from functools import cache
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from autobatch.dataset.rows.formats import choose_format
from autobatch.dataset.rows.reading import all_rows
from autobatch.dataset.rows.sources import find_files
from autobatch.dataset.tokens.bpe import make_bpe
from autobatch.dataset.tokens.rendering import Renderer
from autobatch.dataset.tokens.row_checks import RowChecks
from autobatch.dataset.tokens.tokenizer import load_tokenizer, with_bpe
from autobatch.dataset.tokens.turns import Tally
from tests.tiny import train_tokenizer

SHARED = Path(os.environ.get("AUTOBATCH_SHARED") or Path(__file__).resolve().parents[2] / "shared")
DATA = SHARED / "data"
needs_shared = pytest.mark.skipif(not (DATA / "tokenizers").exists(), reason="needs shared data")

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
CL100K_PLAIN = CL100K.replace("?+", "?").replace("++", "+")
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
CORPUS = (
    "The cat's Cats' don't DON'T we'll we've I'm he'd they're \n\n\t\tHello HELLO 12345 1 22 333",
    "héllo naïve 你好世界 안녕하세요 привет мир ẞß İstanbul ........ ---- aaaa aaaaaa \r\n\r\n fox",
    "สวัสดี नमस्ते مرحبا 😀👨‍👩‍👧 １２３ ٣٤٥ ab ba aab abb aaaabbbb abcabc cba " * 5,
)
BLANKS = "".join(
    map(chr, (*range(9, 14), *range(0x1C, 0x21), 0, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200C)))
) + "".join(map(chr, (0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF, 0x180E)))
PIECES = (
    *"aAbBzZ1 .,'/\n\t",
    *("'s", "'S", "'ſ", "'K", "'RE", "'vE", "'lL", "'d", "'T", "ß", "ẞ", "İ", "ı", "ﬆ", "ŉ"),
    *("👨‍👩‍👧", "e\u0301", "é", "\u1100\u1161\u11a8", "각", "สวัสดี", "नमस्ते", "مرحبا", "１２", "٣٤"),
    *("ǅ", "ʰ", "中", "\u0903", ".\u0903a", "a\u0300\u0323", "\U0001fae8", "\U00031350", "\ue000"),
    *("the", " the", "aaaa", "abcabc", "12345", "\r\n", "\x1d", "\x1e\x1f", "\x1d\x1e\x1f", "\0"),
    *SPECIALS,
    *("<|im_sta", "<|im_start|><|im_end|>", "|>"),
)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(PIECES),
        st.sampled_from(BLANKS),
        st.characters(max_codepoint=127),
        st.characters(exclude_categories=("Cs",)),
    ),
    max_size=25,
).map("".join)


def split(*patterns):
    """Return the pre-tokenizer that cuts words by patterns, one after the other."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def gpt2():
    """Return the pre-tokenizer of GPT-2."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def train(cutter, *, normalizer=None, specials=SPECIALS, all_bytes=True, **model):
    """Return a small tokenizer."""
    backend = Tokenizer(models.BPE(**model))
    backend.pre_tokenizer = cutter
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if all_bytes else []
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False, initial_alphabet=alphabet, special_tokens=[*specials]
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def from_pairs(*pairs, vocab=(), cutter=None, **model):
    """Return a tokenizer that merges pairs, such as "a bc", with more tokens in its vocabulary."""
    merges = [tuple(pair.split(" ")) for pair in pairs]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*alphabet, *("".join(pair) for pair in merges), *vocab])
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, **model))
    backend.pre_tokenizer = gpt2() if cutter is None else cutter
    return backend


def with_added(*contents, **flags):
    """Return a small tokenizer with added tokens."""
    backend = train(gpt2(), specials=())
    backend.add_tokens([AddedToken(c, **{"normalized": False} | flags) for c in contents])
    return backend


def plain(backend):
    """Return what encodes by `tokenizers` alone."""

    def encode(texts):
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [i for e in encodings for i in e.ids]
        return np.array(ids, dtype=np.int32), np.array([len(e) for e in encodings], dtype=np.int64)

    return encode


def rows(encoded):
    """Return the ids of each text as a list."""
    ids, lengths = encoded
    ends = np.cumsum(lengths)
    assert len(ids) == (ends[-1] if len(ends) else 0)
    return [ids[end - n : end].tolist() for end, n in zip(ends, lengths, strict=True)]


class Asked(list):
    """Encodes by `tokenizers`, and keeps what it was asked for."""

    def __init__(self, backend):
        super().__init__()
        self._encode = plain(backend)

    def __call__(self, texts):
        self.extend(texts)
        return self._encode(texts)


def past_comparing(backend, bpe=None):
    """Return a Bpe that has compared enough at first: what follows is tiktoken's own."""
    bpe = bpe or make_bpe(backend)
    bpe.encode(["a" * 20_099], otherwise=plain(backend))
    return bpe


TAKEN = {
    "gpt2": lambda: train(gpt2()),
    "gpt2-some-bytes": lambda: train(gpt2(), all_bytes=False),
    "qwen2": lambda: train(split(QWEN2), normalizer=normalizers.NFC()),
    "llama3": lambda: train(split(LLAMA3), ignore_merges=True, specials=()),
    "o200k": lambda: train(split(O200K)),
    "cl100k-plain": lambda: train(split(CL100K_PLAIN)),
}


@cache
def shared(name):
    """Return a tokenizer that many models have, without and with Bpe, loaded once."""
    plainly = load_tokenizer(str(DATA / "tokenizers" / name))
    return plainly, with_bpe(plainly)


@pytest.fixture(scope="module")
def taken():
    """Return tokenizers by name with their Bpe, made once."""
    made = {}

    def of(name):
        if name not in TAKEN and not (DATA / "tokenizers").exists():
            pytest.skip("needs shared data")
        if name not in made:
            if name in TAKEN:
                backend = TAKEN[name]()
                made[name] = backend, past_comparing(backend)
            else:
                tokenizer, quick = shared(name)
                backend = tokenizer.fast.backend_tokenizer
                made[name] = backend, past_comparing(backend, quick.bpe)
        return made[name]

    yield of
    for backend, bpe in made.values():
        asked = Asked(backend)
        bpe.encode(["a " * 5000] * 60, otherwise=asked)
        assert len(asked) < 60  # or all texts above were left to `tokenizers`


# ---- the same ids ----------------------------------------------------------


@pytest.mark.parametrize("name", [*TAKEN, "qwen3", "smollm2"])
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(texts=st.lists(TEXTS, max_size=8))
def test_any_texts_have_the_ids_of_tokenizers(taken, name, texts):
    """Whatever the characters, whichever part of the texts is left to `tokenizers`."""
    backend, bpe = taken(name)
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=plain(backend)))


@pytest.mark.parametrize("name", [*TAKEN, "qwen3", "smollm2"])
def test_long_runs_have_the_ids_of_tokenizers(taken, name):
    """tiktoken merges words of more than some hundred bytes by another way."""
    backend, bpe = taken(name)
    runs = ["a", " ", "\n", "1", ".", "é", "中", "\u3000", "ab", " a", "'s", "\r\n", "🙂"]
    texts = [head + run * 2000 + head for run in runs for head in ("", "x")]
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=plain(backend)))


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "o200k"])
def test_every_character_has_the_ids_of_tokenizers(taken, name):
    """Every 11th assigned character, among letters, blanks, digits and marks; nearly all taken."""
    backend, bpe = taken(name)
    characters = [
        chr(i)
        for i in range(0, 0x110000, 11)
        if unicodedata.category(chr(i)) not in ("Cn", "Co", "Cs")
    ]
    texts = [f"{c}{c} .{c}a{c}A {c}1{c}'{c}\n{c}/" for c in characters]
    asked = Asked(backend)
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=asked))
    assert len(set(asked)) < 400


@pytest.mark.parametrize("texts", [[], [""], ["", ""], ["", "a", ""], ["<|im_end|>", ""]])
def test_empty_texts_have_no_ids(taken, texts):
    """No text, and texts without a character, keep their places."""
    backend, bpe = taken("gpt2")
    ids, lengths = bpe.encode(texts, otherwise=plain(backend))
    assert (np.int32, np.int64) == (ids.dtype, lengths.dtype)
    assert rows(plain(backend)(texts)) == rows((ids, lengths))


def test_only_texts_that_are_not_sure_are_left_and_order_is_kept(taken):
    """Private and unassigned characters, texts that NFC changes, other cases of a contraction."""
    backend, _ = taken("qwen2")
    bpe = past_comparing(backend)
    sure = ["The cat's", "", "naïve 中文", "<|im_start|>a<|im_end|>", "١٢ \u3000\u2028"]
    unsure = ["\ue000", "a\u0378", "e\u0301", "it'ſ", "\u212b"]
    texts = [text for pair in zip(sure, unsure, strict=True) for text in pair]
    asked = Asked(backend)
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=asked))
    assert unsure == asked


@pytest.mark.parametrize("text", ["a\x1d\x1e\x1fb", "\x1d\x1e\x1f", "\x1d\x1e", "\x1e\x1f\x1d"])
def test_control_characters_between_texts_do_not_shift_them(taken, text):
    """Texts are joined by control characters, which data may hold."""
    backend, bpe = taken("gpt2")
    texts = ["one", text, text, "two"]
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=plain(backend)))


def test_a_run_of_a_million_blanks_is_left_to_tokenizers(taken):
    """Rust's engine gives up where it would look back too often."""
    backend, bpe = taken("llama3")
    texts = [" " * 1_000_001 + "x", "y"]
    asked = Asked(backend)
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=asked))
    assert set(texts) == set(asked)


@pytest.mark.parametrize(
    "pairs",
    [
        ("a b", "b c", "a bc"),  # abc is not reached: ab is merged first
        ("a b", "b c", "a bc", "ab c"),  # two pairs of abc, one after the other
        ("a a", "aa a", "a aa", "aa aa"),
        ("b a", "a b", "ab ab", "ba ba", "ab a"),
        ("a b", "c a", "b c", "ca b", "bc ab", "ab ca"),
        ("a a", "b a", "aa b", "aab aa", "b b", "ba aa"),
    ],
)
def test_words_are_merged_as_the_pairs_say(pairs):
    """All words of up to six letters, with tokens that no pairs reach."""
    backend = from_pairs(*pairs, vocab=("cc", "bbbb"))
    bpe = past_comparing(backend)
    texts = ["".join(word) for n in range(1, 7) for word in product("abc", repeat=n)]
    asked = Asked(backend)
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=asked))
    assert len(asked) < 100


@pytest.mark.parametrize(
    "text", ["<x><y>", "a<x>b", "<x", "<<x>>", " <x> <x>y>", "<y><x>", "hello other"]
)
def test_added_tokens_are_cut_out_alike(text):
    """At both ends, side by side, and unfinished."""
    backend = with_added("<x>", "<y>", "y>", "he")  # the last is a merged token too
    asked, texts = Asked(backend), [text, "b"]
    bpe = past_comparing(backend)
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=asked))
    assert [] == asked


# ---- which tokenizers ------------------------------------------------------


def changed(**settings):
    """Return a small tokenizer with other settings."""
    backend = train(gpt2())
    for name, value in settings.items():
        setattr(backend, name, value)
    return backend


def cutting():
    """Return a small tokenizer that truncates."""
    backend = train(gpt2())
    backend.enable_truncation(3)
    return backend


def padding():
    """Return a small tokenizer that pads."""
    backend = train(gpt2())
    backend.enable_padding()
    return backend


REFUSED = {
    "possessive": lambda: train(split(CL100K)),
    "several splits": lambda: train(split(r"\p{N}{1,3}", QWEN2)),
    "range": lambda: train(split(r"[a-z]+|\s|\S")),
    "lazy": lambda: train(split(r"\S+?|\s")),
    "anchor": lambda: train(split(r"^\s+|\s+|\S+")),
    "empty words": lambda: train(split(r"\p{L}*|\s|\S")),
    "repeated group": lambda: train(split(r"(?:\p{L}|\p{N}?)+|\s|\S")),
    "caseless class": lambda: train(split(r"(?i:\p{Lu}+)|\s|\S")),
    "caseless ß": lambda: train(split(r"(?i:ß)|\s|\S")),
    "callout": lambda: train(split(r"(*FAIL)|\s|\S")),
    "difference of sets": lambda: train(split(r"[a~~b]+|\s|\S")),
    "too large a pattern": lambda: train(split(r"\p{L}{100000}|\s|\S")),
    "prefix space": lambda: train(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": lambda: train(pre_tokenizers.Metaspace()),
    "lowercase": lambda: train(gpt2(), normalizer=normalizers.Lowercase()),
    "NFKC": lambda: train(gpt2(), normalizer=normalizers.NFKC()),
    "pairs apart": lambda: from_pairs("a b", "b c", "a bc", "c c", "ab c"),
    "dropout": lambda: from_pairs("a b", dropout=0.5),
    "word suffix": lambda: from_pairs("a b", end_of_word_suffix="</w>"),
    "word pieces": lambda: Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
    "words taken whole": lambda: from_pairs("a b", vocab=("abc",), ignore_merges=True),
    "lstrip": lambda: with_added("<x>", lstrip=True),
    "rstrip": lambda: with_added("<x>", rstrip=True),
    "single word": lambda: with_added("<x>", single_word=True),
    "normalized": lambda: with_added("<x>", normalized=True),
    "one begins another": lambda: with_added("<x>", "<x>y", "<w>"),
    "separator": lambda: with_added("a\x1d"),
    "special tokens split": lambda: changed(encode_special_tokens=True),
    "truncation": cutting,
    "padding": padding,
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokenizers_that_are_not_surely_alike_are_refused(name):
    """Their rows are left to `tokenizers`."""
    assert make_bpe(REFUSED[name]()) is None


def test_a_word_taken_whole_may_be_an_added_token_that_is_always_cut_out():
    """`é` is shown as two other letters: an added token of these is another text."""
    assert make_bpe(from_pairs("a b", vocab=("<x>",), ignore_merges=True)) is None
    for content, is_taken in (("<x>", True), ("Ã©", False)):
        backend = from_pairs("a b", vocab=(content,), ignore_merges=True, cutter=split(LLAMA3))
        backend.add_tokens([AddedToken(content, normalized=False)])
        assert is_taken == (make_bpe(backend) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{L}+|\s+",
        r"\p{L}{2}|\p{L}[^\p{L}]|[^\p{L}]\p{L}|[^\p{L}]{2}",
        r"\s+(?!\S)|\S+",
        r"\p{Lu}\p{Ll}*|\s|[^\p{Lu}\s]+",
    ],
)
def test_characters_that_a_pattern_leaves_out_keep_their_ids(pattern):
    """tiktoken drops what matches nowhere, `tokenizers` takes it as a word."""
    backend = train(split(pattern))
    texts = ["aaa", "a1b2", "Ab  c", "...", "  ", "a b", "ABc.d", ""]
    bpe = make_bpe(backend)
    bpe.encode(["aA" * 10_049], otherwise=plain(backend))
    assert rows(plain(backend)(texts)) == rows(bpe.encode(texts, otherwise=plain(backend)))


# ---- comparing -------------------------------------------------------------


def test_nothing_is_trusted_after_one_difference():
    """The ids of other pairs: all is left to `tokenizers` from then on."""
    bpe, other = make_bpe(from_pairs("a b")), from_pairs("b a")
    asked = Asked(other)
    for texts in (["aba"], ["xyz", "q"]):
        asked.clear()
        assert rows(plain(other)(texts)) == rows(bpe.encode(texts, otherwise=asked))
    assert ["xyz", "q"] == asked


def test_a_small_part_of_all_texts_is_compared(taken):
    """The first texts, then one character in 200."""
    backend, _ = taken("gpt2")
    bpe, texts = make_bpe(backend), ["The cat's Hello 12345 "] * 1000
    first, later = Asked(backend), Asked(backend)
    bpe.encode(texts, otherwise=first)
    for _ in range(20):
        bpe.encode(texts, otherwise=later)
    assert 19_000 < sum(map(len, first)) < 21_000
    assert 1_000 < sum(map(len, later)) < 3_000


# ---- the table of unreachable tokens on disk -------------------------------

UNREACHED = ("a b", "b c", "a bc")  # abc is made of ab and c by tiktoken if nobody tells it


@pytest.mark.parametrize("damage", [None, b"", b"{", b"[]", b'{"unreachable": 3}', b"\xff\0"])
def test_what_is_kept_on_disk_is_read_or_made_again(tmp_path, monkeypatch, damage):
    """A damaged file is written anew."""
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "cache"))
    backend = from_pairs(*UNREACHED)
    make_bpe(backend)
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert kept
    times = {}
    for path in kept:
        os.utime(path, (1, 1))
        if damage is not None:
            path.write_bytes(damage)
        times[path] = path.stat().st_mtime_ns
    bpe = past_comparing(backend)
    assert kept == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert (damage is None) == (times == {path: path.stat().st_mtime_ns for path in kept})
    assert rows(plain(backend)(["abc"])) == rows(bpe.encode(["abc"], otherwise=plain(backend)))


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    """A file stands where the folder would be."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "file" / "cache"))
    backend = from_pairs(*UNREACHED)
    bpe = past_comparing(backend)
    asked = Asked(backend)
    assert rows(plain(backend)(["abc"])) == rows(bpe.encode(["abc"], otherwise=asked))
    assert [] == asked


# ---- Tokenizer.encode_ids and rows -----------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Return the directory of a small tokenizer."""
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("single", [None, "<|im_start|> $A <|im_end|>", "$A <|im_end|>", "$A"])
@pytest.mark.parametrize("texts", [["The cat", "", "\ue000", "<|im_end|>"], [""], []])
@pytest.mark.parametrize("adds", [False, True])
def test_encode_ids_adds_what_the_post_processor_adds(directory, single, texts, adds):
    """BOS and EOS stand around every text, around an empty one too."""
    tokenizer = load_tokenizer(directory)
    backend = tokenizer.fast.backend_tokenizer
    if single is not None:
        specials = [(t, backend.token_to_id(t)) for t in SPECIALS]
        backend.post_processor = TemplateProcessing(single=single, special_tokens=specials)
    quick = with_bpe(tokenizer)
    assert quick.bpe is not None
    encodings = backend.encode_batch(texts, add_special_tokens=adds)
    for some in (tokenizer, quick):
        encoded = some.encode_ids(texts, add_special_tokens=adds)
        assert [e.ids for e in encodings] == rows(encoded)
        assert (np.int32, np.int64) == (encoded[0].dtype, encoded[1].dtype)


def test_special_tokens_that_the_config_splits_are_split(tmp_path):
    """`split_special_tokens` of tokenizer_config.json is no part of tokenizer.json."""
    config = train_tokenizer(tmp_path) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"split_special_tokens": True}))
    tokenizer = load_tokenizer(str(tmp_path))
    texts = ["<|im_start|>a"]
    expected = rows(tokenizer.encode_ids(texts, add_special_tokens=False))
    assert len(expected[0]) > 2
    assert expected == rows(with_bpe(tokenizer).encode_ids(texts, add_special_tokens=False))


@needs_shared
@pytest.mark.parametrize(
    ("name", "num_rows"),
    [("messages_tools_agent", 60), ("sharegpt_zh", 200), ("gsm8k", 200), ("text_longtail", 200)],
)
def test_real_rows_are_rendered_alike(name, num_rows):
    """Ids and labels of the first rows; those of agents are long."""
    files = find_files([str(DATA / name / "train.jsonl")])
    fmt = choose_format(files)
    some = list(islice(all_rows(files, fmt), num_rows))
    batches = []
    for tokenizer in shared("qwen3"):
        renderer = Renderer(fmt, tokenizer, RowChecks(tokenizer, turn_by_turn="off"))
        renderer.trust.num_searches_left = 0  # spans are compared elsewhere, which takes seconds
        batches.append(renderer.render(some, Tally()))
    plainly, quickly = batches
    assert plainly.num_samples == len(some)
    for part in ("table", "ids", "labels"):
        assert np.array_equal(getattr(plainly, part), getattr(quickly, part))


@needs_shared
def test_real_text_is_taken_by_tiktoken():
    """Nearly none of it is left to `tokenizers`."""
    tokenizer, quick = shared("qwen3")
    asked = Asked(tokenizer.fast.backend_tokenizer)
    file = DATA / "text_longtail" / "train.jsonl"
    with file.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 100)]
    bpe = quick.bpe
    bpe.encode(texts, otherwise=Asked(tokenizer.fast.backend_tokenizer))
    bpe.encode(texts, otherwise=asked)
    assert sum(map(len, asked)) < sum(map(len, texts)) / 10
