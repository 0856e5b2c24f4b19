"""A profile finds what is wrong with tokenizer, template and text, and says it with numbers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from autobatch.dataset.lengths.checks import tokenizer_warnings
from autobatch.dataset.lengths.findings import GRAVITY
from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.tokens.row_checks import RowChecks, _even, _widening
from autobatch.dataset.tokens.token_checks import TokenCounts, count_beyond, count_tokens
from autobatch.dataset.tokens.tokenizer import load_tokenizer
from autobatch.errors import ConfigError
from autobatch.records import LengthProfile, RowPlace
from tests.test_dataset_shared import DATA, QWEN3
from tests.test_dataset_truncation import Samples
from tests.tiny import CHATML, train_tokenizer, write_jsonl

CHAT = [
    {"role": "user", "content": "What is two?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And four?"},
    {"role": "assistant", "content": "Four plus."},
]
THINKING = CHATML.replace(
    "message['content']",
    "('<think></think>' if message.role == 'assistant' and loop.last and not loop.first else '')"
    " + message['content']",
)
NEEDS_USER = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}" + CHATML
)
TRIMMING = CHATML.replace("message['content']", "message['content'] | trim")
WITH_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}"
    "{% endif %}" + CHATML
)
WITH_BOS = "{{ bos_token }}" + CHATML


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    """Tokenizer directories, trained once for each template, config and post-processor."""
    made: dict[str, str] = {}

    def of(template: str | None = CHATML, *, adds_bos: bool = False, **config) -> str:
        key = json.dumps([template, adds_bos, config])
        if key not in made:
            folder = train_tokenizer(tmp_path_factory.mktemp("t"), chat_template=template)
            edit(folder / "tokenizer_config.json", config)
            if adds_bos:
                bos = {"id": "<|endoftext|>", "type_id": 0}
                sequence = {"Sequence": {"id": "A", "type_id": 0}}
                special = {"id": bos["id"], "ids": [0], "tokens": [bos["id"]]}
                processor = {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": bos}, sequence],
                    "pair": [sequence, {"Sequence": {"id": "B", "type_id": 1}}],
                    "special_tokens": {bos["id"]: special},
                }
                edit(folder / "tokenizer.json", {"post_processor": processor})
            made[key] = str(folder)
        return made[key]

    return of


def edit(path: Path, changes: dict) -> None:
    """Change fields of a JSON file; None takes a field out."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Profile rows under a tokenizer, each time with a cache of its own."""
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "cache"))

    def of(rows: list[dict], tokenizer: str, **options) -> LengthProfile:
        text = json.dumps(rows)
        file = tmp_path / f"{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
        if not file.exists():  # written again it would be another file to the cache
            write_jsonl(file, rows)
        return profile_lengths([str(file)], tokenizer_dir=tokenizer, **options)

    return of


def said(profile: LengthProfile, name: str):
    """Return the one warning of an id."""
    found = [w for w in profile.warnings if w.id == name]
    assert len(found) == 1, [w.id for w in profile.warnings]
    return found[0]


def ids(profile: LengthProfile) -> set[str]:
    """Return the ids of all warnings."""
    return {w.id for w in profile.warnings}


def chats(*conversations) -> list[dict]:
    """Make rows of messages."""
    return [{"messages": list(messages)} for messages in conversations]


# ---- sound -----------------------------------------------------------------


def test_a_sound_tokenizer_gives_no_warning(measure, tokenizers):
    """ChatML with EOS as end marker, a padding token of its own, ordinary text."""
    assert () == measure(chats(CHAT, CHAT), tokenizers()).warnings


# ---- end, begin, padding ---------------------------------------------------


def test_template_that_ends_turns_otherwise_than_eos(measure, tokenizers):
    """The label ends with the template's marker, generation waits for EOS."""
    profile = measure(chats(CHAT, CHAT[:2]), tokenizers(eos_token="<|endoftext|>"))
    warning = said(profile, "eos_not_in_labels")
    assert warning.seen.startswith("2 of 2 rows with labels have no <|endoftext|>")
    assert "ends a turn with <|im_end|>, eos_token is <|endoftext|>" in warning.cause
    assert "set eos_token to <|im_end|>" in warning.next_move


def test_labels_masked_by_padding_id_lack_their_end(measure, tokenizers):
    """Ready-made ids whose EOS was masked like padding: the rows are counted (A10)."""
    rows = [
        {"input_ids": [5, 6, 2, 2], "labels": [5, 6, -100, -100]},
        {"input_ids": [5, 6, 2, 2], "labels": [-100, 6, 2, -100]},
    ]
    warning = said(measure(rows, tokenizers()), "eos_not_in_labels")
    assert warning.seen.startswith("1 of 2 rows with labels")
    assert "pad and EOS are one token" in warning.cause


@pytest.mark.parametrize(
    ("config", "name"),
    [({"pad_token": None}, "pad_missing"), ({"pad_token": "<|im_end|>"}, "pad_is_eos")],
)
def test_padding_by_position_keeps_the_end(measure, tokenizers, config, name):
    """Said for other trainers; here every row keeps its EOS as a label (A10)."""
    profile = measure(chats(CHAT), tokenizers(**config))
    assert "by position" in said(profile, name).next_move
    assert {name} == ids(profile)


def test_padding_outside_the_embedding(measure, tokenizers, tmp_path):
    """A padding token that was added without growing the embedding (A10)."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in Path(tokenizers()).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    state = json.loads((folder / "tokenizer.json").read_text())
    token = {**state["added_tokens"][0], "id": 900, "content": "<|pad|>"}
    edit(folder / "tokenizer.json", {"added_tokens": [*state["added_tokens"], token]})
    edit(folder / "tokenizer_config.json", {"pad_token": "<|pad|>"})
    pad_id = load_tokenizer(str(folder)).fast.pad_token_id
    write_config(folder, vocab_size=pad_id)
    profile = measure(chats(CHAT), str(folder), model=str(folder))
    assert said(profile, "pad_outside_embedding").seen == (
        f"pad_token <|pad|> is id {pad_id}, and the model's embedding has {pad_id} rows"
    )
    write_config(folder, vocab_size=pad_id + 1)
    assert "pad_outside_embedding" not in ids(measure(chats(CHAT), str(folder), model=str(folder)))


def write_config(folder: Path, *, vocab_size: int) -> None:
    """Write the config of a small model."""
    config = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": vocab_size,
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_ids_outside_the_embedding_are_counted(measure, tokenizers, tmp_path):
    """Ids of another model in the data: tokens and rows; in the tokenizer only: milder."""
    rows = [{"input_ids": [5, 99, 100, 101]}, {"input_ids": [5, 2]}, {"input_ids": [100, 2]}]
    for vocab_size in (100, 102, 2000):
        (tmp_path / str(vocab_size)).mkdir()
        write_config(tmp_path / str(vocab_size), vocab_size=vocab_size)
    profile = measure(rows, tokenizers(), model=str(tmp_path / "100"))
    assert said(profile, "token_outside_embedding").seen == (
        "3 tokens in 2 rows have ids up to 101, and the model's embedding has 100 rows"
    )
    milder = measure(rows, tokenizers(), model=str(tmp_path / "102"))
    assert "no row of the data holds such an id" in said(milder, "tokenizer_outside_embedding").seen
    fitting = measure(rows, tokenizers(), model=str(tmp_path / "2000"))
    assert {"token_outside_embedding", "tokenizer_outside_embedding"}.isdisjoint(ids(fitting))


def test_no_eos_is_said(measure, tokenizers):
    """Nothing to learn to stop with, in text and in chats."""
    without = tokenizers(eos_token=None)
    assert "rows end without one" in said(measure([{"text": "two"}], without), "no_eos").seen
    assert "where to stop" in said(measure(chats(CHAT), without), "no_eos").seen


BOS = {"bos_token": "<|endoftext|>"}


def test_bos_that_the_template_forgets(measure, tokenizers):
    """The tokenizer puts it before plain text, the template does not print it."""
    profile = measure(chats(CHAT, CHAT[:2]), tokenizers(adds_bos=True, **BOS))
    assert said(profile, "bos_missing").seen.startswith(
        "2 of 2 rows begin without <|endoftext|> (bos_token)"
    )


def test_bos_that_both_add(measure, tokenizers):
    """Here rendered text is tokenized without additions; other trainers double it."""
    profile = measure(chats(CHAT), tokenizers(WITH_BOS, adds_bos=True, **BOS))
    assert "add_special_tokens=False" in said(profile, "bos_doubled_elsewhere").next_move
    assert "bos_missing" not in ids(profile)


def test_bos_written_in_text_is_doubled(measure, tokenizers):
    """A text that begins with BOS gets another: counted by row."""
    rows = [{"text": "<|endoftext|>two"}, {"text": "two"}, {"text": "<|endoftext|>four"}]
    profile = measure(rows, tokenizers(adds_bos=True, **BOS))
    assert said(profile, "bos_doubled").seen == (
        "2 of 3 rows begin with <|endoftext|> (bos_token) twice"
    )


def test_bos_that_nobody_adds_is_no_fault(measure, tokenizers):
    """A tokenizer may name a BOS and never use it (Qwen2.5 does)."""
    assert () == measure(chats(CHAT), tokenizers(**BOS)).warnings


def test_pairs_without_a_template_are_said(measure, tokenizers):
    """A base tokenizer renders prompt, response, EOS; the remedies are named (A09)."""
    profile = measure([{"prompt": "two", "response": "four"}], tokenizers(None))
    warning = said(profile, "no_chat_template")
    assert "chat_template.jinja" in warning.next_move
    assert "--tokenizer" in warning.next_move


# ---- text ------------------------------------------------------------------


def test_control_tokens_in_text_are_counted_with_rows_and_roles(measure, tokenizers):
    """Special tokens that someone typed: which, where, by whom."""
    fake = {"role": "user", "content": "Say <|im_end|>\n<|im_start|>system"}
    answer = {"role": "assistant", "content": "You mean <|im_end|>?"}
    rows = chats(CHAT, [fake, CHAT[1]], [CHAT[0], answer], [CHAT[0], CHAT[1]])
    warning = said(measure(rows, tokenizers()), "control_tokens")
    assert warning.seen.startswith(
        "2 of 4 rows have special tokens typed in their text (rows 1, 2): "
    )
    assert "<|im_end|> (2)" in warning.seen
    assert "<|im_start|> (1)" in warning.seen
    assert "written by user (1), assistant (1)" in warning.seen


def test_tags_that_are_no_special_tokens_are_no_fault(measure, tokenizers):
    """HTML, think tags, half a marker."""
    tags = {"role": "user", "content": "<b>two</b> <think> <|im_ <| |> im_end"}
    assert () == measure(chats([tags, CHAT[1]]), tokenizers()).warnings


def word_level(folder: Path) -> str:
    """Make a tokenizer of three words, lower case, that knows nothing else."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2, "two": 3, "plus": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(str(folder))
    return str(folder)


def test_unknown_tokens_are_counted(measure, tmp_path):
    """Words outside the vocabulary: how many tokens, in how many rows."""
    rows = [{"text": "two plus two"}, {"text": "two 北 and more"}, {"text": "zwei"}]
    profile = measure(rows, word_level(tmp_path / "t"))
    assert said(profile, "unknown_tokens").seen == (
        "4 tokens in 2 of 3 rows are the unknown token: their text is lost"
    )
    failing = said(profile, "round_trip").seen
    assert all(name in failing for name in ("English", "Chinese", "Arabic", "emoji", "code"))


def test_unknown_pieces_of_a_unigram_are_counted(measure, tmp_path):
    """The sentence-piece kind tells no unk_token of its own."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("<eos>", 0.0), ("<pad>", 0.0), ("t", -1.0), ("wo", -1.0)]
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.Unigram(pieces, unk_id=0)),
        unk_token="<unk>",
        eos_token="<eos>",
        pad_token="<pad>",
    ).save_pretrained(str(tmp_path / "t"))
    profile = measure([{"text": "twotwo"}, {"text": "t two"}], str(tmp_path / "t"))
    assert said(profile, "unknown_tokens").seen.startswith("1 tokens in 1 of 2 rows")


@pytest.mark.parametrize(
    ("normalizer", "failing"),
    [
        ({"type": "NFC"}, None),  # the same characters, spelled otherwise
        ({"type": "StripAccents"}, "combining marks"),
        ({"type": "Replace", "pattern": {"String": "\t"}, "content": " "}, "code with tabs"),
        ({"type": "Replace", "pattern": {"String": "，"}, "content": ","}, "Chinese"),
    ],
)
def test_round_trip_names_the_script_that_fails(measure, tmp_path, normalizer, failing):
    """A normalizer that changes text is found by what it changes."""
    folder = train_tokenizer(tmp_path / "t")
    edit(folder / "tokenizer.json", {"normalizer": normalizer})
    if failing == "combining marks":  # accents go only after they are apart
        both = {"type": "Sequence", "normalizers": [{"type": "NFD"}, normalizer]}
        edit(folder / "tokenizer.json", {"normalizer": both})
    profile = measure(chats(CHAT), str(folder))
    if failing is None:
        assert () == profile.warnings
    else:
        seen = said(profile, "round_trip").seen
        assert seen.startswith("decode(encode(text)) gives another text for")
        assert failing in seen
        assert "English" not in seen


# ---- template --------------------------------------------------------------


def test_refusals_are_told_in_the_templates_own_words(measure, tokenizers):
    """Each sentence with the number of rows it was said for."""
    template = (
        "{% if messages | length > 3 %}{{ raise_exception('one turn only') }}{% endif %}"
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('user first') }}{% endif %}"
    )
    rows = chats(CHAT, CHAT, CHAT[1:3], CHAT[:2])
    warning = said(measure(rows, tokenizers(template + CHATML)), "rows_skipped")
    assert warning.seen == "3 of 4 rows skipped: template refuses the row (rows 0, 1, 2)"
    assert warning.cause == "TemplateError: one turn only (2), TemplateError: user first (1)"


def test_many_reasons_are_told_in_sum(measure, tokenizers):
    """Four reasons for skipping one by one, the others together."""
    rows = [{"conversations": [{"from": f"bot{i}", "value": "two"}]} for i in range(7)]
    good = [{"from": "human", "value": "two"}, {"from": "gpt", "value": "four"}]
    profile = measure([*rows, {"conversations": good}], tokenizers())
    seen = [w.seen for w in profile.warnings if w.id == "rows_skipped"]
    assert len(seen) == 5
    assert seen[-1] == "3 of 8 rows skipped for 3 more reasons"


@pytest.mark.parametrize("template", [CHATML, TRIMMING, WITH_SYSTEM, WITH_BOS.replace("bos", "x")])
def test_templates_that_print_each_message_alike_do_not_differ(measure, tokenizers, template):
    """Plain, trimming, with a default system prompt (which is cut off later turns)."""
    rows = chats(CHAT, CHAT[:2], [{"role": "system", "content": " Be brief. "}, *CHAT])
    profile = measure(rows, tokenizers(template), turn_by_turn="all")
    turns = profile.turn_by_turn
    assert turns is not None
    assert (turns.num_rows_compared, turns.num_rows) == (3, 3)
    assert (turns.num_rows_differ, turns.num_rows_refused, turns.tokens_more) == (0, 0, 0)
    assert "turn_by_turn" not in ids(profile)


def test_thinking_in_the_last_turn_only_differs(measure, tokenizers):
    """Rendered alone no answer has the block: rows, places and tokens are counted (A12)."""
    rows = chats(CHAT, CHAT[:1], CHAT[:2])
    profile = measure(rows, tokenizers(THINKING))
    block = len(
        load_tokenizer(tokenizers()).encode(["<think></think>"], add_special_tokens=False)[0]
    )
    turns = profile.turn_by_turn
    assert turns is not None
    assert (turns.num_rows_compared, turns.num_rows_differ) == (3, 2)
    assert turns.tokens_more == pytest.approx(-2 * block, abs=4)  # tokens may merge at its border
    assert [place.row for place in turns.rows] == [0, 2]
    warning = said(profile, "turn_by_turn")
    assert warning.seen.startswith("of 3 rows compared (of 3), 2 get other tokens (-")
    assert "data.ignore_input_ids_mismatch=true" in warning.next_move


def test_a_template_that_wants_a_user_refuses_single_messages(measure, tokenizers):
    """Every row renders whole and is refused message by message, predicted here (A12)."""
    rows = chats([{"role": "system", "content": "Be brief."}, *CHAT], CHAT[:2])
    profile = measure(rows, tokenizers(NEEDS_USER))
    turns = profile.turn_by_turn
    assert turns is not None
    assert profile.skipped == {}
    assert (turns.num_rows_refused, turns.num_rows_differ) == (2, 0)
    assert turns.refusal == "TemplateError: No user query found in messages."
    assert turns.rows == tuple(RowPlace(file=profile.data.files[0], row=i) for i in range(2))
    assert "2 are refused message by message" in said(profile, "turn_by_turn").seen


def test_tokens_across_two_messages_differ_though_texts_agree(measure, tokenizers):
    """Without a border between messages tokens merge in the whole rendering only."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = chats([{"role": "user", "content": "tw"}, {"role": "assistant", "content": "o plus"}])
    profile = measure(rows * 40, tokenizers(template), turn_by_turn="all")
    turns = profile.turn_by_turn
    assert turns is not None
    assert (turns.num_rows_compared, turns.num_rows_differ) == (40, 40)
    assert turns.tokens_more > 0


def test_the_sample_is_spread_and_said(measure, tokenizers):
    """64 of 300 rows or so by default, every row on demand, none when off."""
    rows = chats(*[CHAT[:2]] * 300)
    tokenizer = tokenizers()
    sampled = measure(rows, tokenizer).turn_by_turn
    assert sampled is not None
    assert 64 <= sampled.num_rows_compared < 100
    assert sampled.num_rows == 300
    whole = measure(rows, tokenizer, turn_by_turn="all").turn_by_turn
    assert whole is not None
    assert whole.num_rows_compared == 300
    # what is known already is kept, whatever less is asked
    assert measure(rows, tokenizer, turn_by_turn="sample").turn_by_turn == whole


def test_a_profile_that_was_never_checked_is_made_anew(measure, tokenizers):
    """One that an earlier version left in the cache has no warnings of ours."""
    rows = chats(CHAT)
    first = measure(rows, tokenizers(THINKING))
    cached = Path(str(first.cache_dir)) / "profile.json"
    edit(cached, {"tokenizer_facts": None, "turn_by_turn": None, "warnings": []})
    assert first == measure(rows, tokenizers(THINKING))


@pytest.mark.parametrize(
    ("num_rows", "compared"), [(10, 10), (64, 64), (5000, 65), (1_000_000, 2000), (99_999, 1000)]
)
def test_a_known_number_of_rows_is_sampled_evenly(num_rows, compared):
    """Every k-th row from the first to the end, a few thousand at most."""
    chosen = [n for n in range(num_rows) if n % _even(num_rows) == 0]
    assert len(chosen) == compared
    assert len(set(np.diff(chosen))) == 1


def test_an_unknown_number_of_rows_is_sampled_wider_and_wider():
    """A file that does not say its rows: some thousands of a million, to its end."""
    chosen = [n for n in range(1_000_000) if n % _widening(n) == 0]
    assert 2000 < len(chosen) < 8000
    assert chosen[-1] > 990_000


def test_parts_looked_at_apart_add_up(tokenizers):
    """Counts and first places of two halves are those of the whole, in any order."""
    tokenizer = load_tokenizer(tokenizers(THINKING))
    typed = [{"role": "user", "content": "<|im_end|>"}, CHAT[1]]
    rows = [CHAT, typed, CHAT[:1], typed, CHAT, CHAT[:2]]
    parts = {name: RowChecks(tokenizer, turn_by_turn="all") for name in ("whole", "one", "two")}
    for number, messages in enumerate(rows):
        text = tokenizer.render(messages)
        for name in ("whole", "one" if number < 3 else "two"):
            parts[name].conversation((number, 0, number), messages, None, text)
    parts["two"].tally.add(parts["one"].tally)
    assert parts["whole"].tally == parts["two"].tally
    assert parts["whole"].tally.turns.num_rows_differ == 5


def test_off_compares_nothing_and_is_no_answer_later(measure, tokenizers):
    """Whoever asks for a sample afterwards gets one."""
    rows = chats(CHAT)
    assert measure(rows, tokenizers(THINKING), turn_by_turn="off").turn_by_turn is None
    assert measure(rows, tokenizers(THINKING)).turn_by_turn is None  # tune does not ask
    assert measure(rows, tokenizers(THINKING), turn_by_turn="sample").turn_by_turn is not None


def test_an_unknown_mode_is_refused(measure, tokenizers):
    """The three words are named."""
    with pytest.raises(ConfigError, match=r"turn_by_turn is 'some'; use one of all, sample, off"):
        measure(chats(CHAT), tokenizers(), turn_by_turn="some")


# ---- counts and order ------------------------------------------------------


def test_counts_over_ids_are_those_of_a_loop(monkeypatch):
    """Over many chunks, rows are never split or counted twice."""
    monkeypatch.setattr("autobatch.dataset.tokens.token_checks._CHUNK_TOKENS", 50)
    random = np.random.default_rng(0)
    lengths = random.integers(1, 30, 200)
    tokens = random.integers(0, 8, int(lengths.sum())).astype(np.int32)
    labels = random.integers(0, 2, len(tokens)).astype(np.uint8)
    starts = np.cumsum(lengths) - lengths
    rows = [
        (tokens[s : s + n], labels[s : s + n] > 0) for s, n in zip(starts, lengths, strict=True)
    ]
    cache = Samples(
        lengths=lengths,
        label_tokens=np.array([mask.sum() for _, mask in rows]),
        starts=starts,
        labels=labels,
        num_samples=200,
    )
    object.__setattr__(cache, "tokens", tokens)
    expected = TokenCounts(
        largest_id=7,
        num_unknown=int((tokens == 3).sum()),
        num_rows_unknown=sum((row == 3).any() for row, _ in rows),
        num_rows_without_eos=sum(mask.any() and not (row[mask] == 2).any() for row, mask in rows),
        num_rows_without_bos=sum(row[0] != 1 for row, _ in rows),
        num_rows_two_bos=sum(row[:2].tolist() == [1, 1] for row, _ in rows),
    )
    assert expected == count_tokens(cache, unk_id=3, eos_id=2, bos_id=1)
    beyond = (int((tokens >= 6).sum()), sum((row >= 6).any() for row, _ in rows))
    assert beyond == count_beyond(cache, 6)


def test_warnings_are_ordered_by_gravity(measure, tokenizers):
    """Lost rows first, advice for other trainers last."""
    typed = [{"role": "user", "content": "<|im_end|>"}, CHAT[1]]
    rows = chats(typed, CHAT, CHAT[:1], [])
    profile = measure(rows, tokenizers(THINKING, pad_token="<|im_end|>"))
    assert [w.id for w in profile.warnings] == [
        "rows_skipped",
        "control_tokens",
        "rows_without_labels",
        "turn_by_turn",
        "pad_is_eos",
    ]


def test_every_warning_has_three_parts_and_a_place(tokenizers):
    """None is empty, none is left out of the order."""
    counts = TokenCounts(
        largest_id=9,
        num_unknown=1,
        num_rows_unknown=1,
        num_rows_without_eos=1,
        num_rows_without_bos=1,
        num_rows_two_bos=1,
    )
    tokenizer = load_tokenizer(tokenizers(adds_bos=True, **BOS))
    found = tokenizer_warnings(tokenizer, counts, format="messages", num_samples=1, num_trainable=1)
    for warning in found:
        assert warning.id in GRAVITY
        assert all((warning.seen, warning.cause, warning.next_move))


# ---- real tokenizers -------------------------------------------------------


@pytest.mark.skipif(not QWEN3.exists(), reason="needs the shared data sets")
@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        # an answer alone has no question before it, so Qwen3 prints no empty think block: -4
        ("qwen3", {"padding_waste", "turn_by_turn"}),
        ("smollm2", {"padding_waste", "pad_is_eos"}),  # both are <|im_end|>
    ],
)
def test_real_tokenizers_give_only_true_warnings(tmp_path, monkeypatch, tokenizer, expected):
    """Nothing is made up about sound tokenizers and clean data."""
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path))
    file = str(DATA / "alpaca_en" / "train.parquet")
    profile = profile_lengths([file], tokenizer_dir=str(DATA / "tokenizers" / tokenizer))
    assert expected == ids(profile)
    turns = profile.turn_by_turn
    assert turns is not None
    differ = turns.num_rows_compared if tokenizer == "qwen3" else 0
    assert (turns.num_rows_differ, turns.tokens_more) == (differ, -4 * differ)
