"""Rows rendered on all cores, by every short cut, are those of the slow way."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from autobatch.dataset.rows.files import DataFile, find_files
from autobatch.dataset.rows.formats import RowFormat
from autobatch.dataset.rows.reading import all_parts, all_rows
from autobatch.dataset.tokens.encoding import Trust
from autobatch.dataset.tokens.parallel import render_rows
from autobatch.dataset.tokens.rendering import Renderer
from autobatch.dataset.tokens.row_checks import RowChecks
from autobatch.dataset.tokens.templates import is_plain, quick_render
from autobatch.dataset.tokens.tokenizer import load_tokenizer
from autobatch.dataset.tokens.turns import Tally
from autobatch.dataset.tokens.workers import Workers
from autobatch.errors import DataError
from tests.tiny import CHATML, train_tokenizer, write_parquet

MESSAGES = RowFormat(name="messages", keys={"messages_key": "messages"})
# the last turn thinks, turns are trimmed, tool calls are printed, a system turn is refused
THINKING = (
    "{% set ns = namespace(last=messages|length - 1) %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' and loop.index0 == ns.last %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message.content.strip().split('</think>')[-1] }}"
    "{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LOOP = (
    "{%% for m in messages if m.role != 'x' %%}{{ loop.first ~ loop.index0 ~ (%s) }}{%% endfor %%}"
)
MACRO = "{%% macro show(m) %%}{{ m.role ~ (%s) }}{%% endmacro %%}{{ show(messages[0]) }}"
WORDS = ("two", " plus", " four?", "\n", "北京", " é", "e\u0301", "<|im_end|>", "  ", "👍")


@pytest.fixture(scope="module", params=[CHATML, THINKING], ids=["chatml", "thinking"])
def tokenizer(request, tmp_path_factory):
    """A tokenizer with one of two templates."""
    directory = tmp_path_factory.mktemp("tokenizer")
    return load_tokenizer(str(train_tokenizer(directory, chat_template=request.param)))


def conversations(num_rows: int, seed: int = 0) -> list[tuple[int, int, dict]]:
    """Return rows of every awkward kind, in an order that a seed draws."""
    rng = np.random.default_rng(seed)

    def text() -> str:
        return "".join(rng.choice(WORDS, int(rng.integers(0, 12))))

    rows = []
    for i in range(num_rows):
        turns = [
            {"role": ("user", "assistant")[n % 2], "content": text()}
            for n in range(int(rng.integers(1, 6)))
        ]
        kind = int(rng.integers(0, 12))
        if kind == 0:
            turns[-1]["content"] = None
        elif kind == 1:
            call = {"function": {"name": "f", "arguments": {"x": text(), "y": [1, None]}}}
            turns[-1]["tool_calls"] = [call]
        elif kind == 2:
            turns.insert(0, {"role": "system", "content": text()})
        elif kind == 3:
            turns[-1]["content"] = "<|im_start|>assistant\nfoo<|im_end|>" + text()
        elif kind == 4:
            turns[0]["content"] = 5
        elif kind == 5:
            turns[-1]["reasoning"] = text()
        rows.append((0, i, {"messages": turns}))
    return rows


def joined(batches) -> tuple[list, list, list]:
    """Return tables, ids and labels of all batches."""
    batches = list(batches)
    return tuple(
        np.concatenate([getattr(batch, name) for batch in batches]).tolist()
        for name in ("table", "ids", "labels")
    )


def slowly(rows, tokenizer) -> tuple[tuple[list, list, list], Tally]:
    """Return what rows become without any short cut."""
    tally = Tally()
    renderer = Renderer(MESSAGES, tokenizer, RowChecks(tokenizer))
    renderer.trust = Trust(quick=False, search=True, ids=False)
    return joined([renderer.render(rows, tally)]), tally


def test_short_cuts_change_no_id_and_no_label(tokenizer):
    """Quick templates and labels told from ids give what transformers and offsets give."""
    rows = conversations(1500)
    expected, slow_tally = slowly(rows, tokenizer)
    tally = Tally()
    assert joined(render_rows(rows, MESSAGES, tokenizer, tally, RowChecks(tokenizer))) == expected
    assert tally == slow_tally


def test_short_cuts_are_taken(tokenizer):
    """The rows above do not fall back: both short cuts still hold after them."""
    renderer = Renderer(MESSAGES, tokenizer, RowChecks(tokenizer))
    renderer.render(conversations(200), Tally())
    assert (renderer.trust.quick, renderer.trust.ids) == (True, True)


def test_workers_render_what_one_process_renders(tokenizer):
    """The same samples, in order, and the same tally, down to the numbers of skipped rows."""
    rows = conversations(1500) * 2
    tally, alone = Tally(), Tally()
    checks, checks_alone = RowChecks(tokenizer), RowChecks(tokenizer)
    expected = joined(render_rows(rows, MESSAGES, tokenizer, alone, checks_alone))
    many = render_rows(rows, MESSAGES, tokenizer, tally, checks, num_rows=10**9, num_workers=2)
    assert joined(many) == expected
    assert checks.tally == checks_alone.tally
    assert tally == alone
    assert tally.num_rows == 3000
    numbers = [number for places in tally.examples.values() for number, _, _ in places]
    assert numbers == [row for places in tally.examples.values() for _, _, row in places]


def test_one_core_renders_many_rows_the_same(tokenizer):
    """Without workers the encoder changes on the way, the samples do not."""
    rows = conversations(1500) * 2
    tally, alone = Tally(), Tally()
    expected = joined(render_rows(rows, MESSAGES, tokenizer, alone, RowChecks(tokenizer)))
    checks = RowChecks(tokenizer)
    many = render_rows(rows, MESSAGES, tokenizer, tally, checks, num_rows=10**9, num_workers=1)
    assert (expected, alone) == (joined(many), tally)


def chats(path: Path) -> list[DataFile]:
    """Write a parquet file of plain conversations."""
    rows = [row for _, _, row in conversations(2000) if plain(row["messages"])]
    return find_files([write_parquet(path, rows * 8)])


def plain(turns: list[dict]) -> bool:
    """Return whether turns hold text alone, as one column type can."""
    return all(isinstance(turn["content"], str) and len(turn) == 2 for turn in turns)


def ready(workers: Workers, batches) -> list:
    """Return the batches that were rendered until workers could begin."""
    some = []
    while not workers.is_taught:
        some.append(next(batches))
    while not workers.are_ready():
        time.sleep(0.05)
    return some


def test_early_workers_render_what_arrow_read(tokenizer, tmp_path):
    """Parts of a file, read in the workers, become the samples of its rows."""
    found = chats(tmp_path / "a.parquet")
    tally, alone = Tally(), Tally()
    rows = all_rows(found, MESSAGES)
    expected = joined(render_rows(rows, MESSAGES, tokenizer, alone, RowChecks(tokenizer)))
    workers, checks = Workers(tokenizer.directory, 2), RowChecks(tokenizer)
    parts = all_parts(found, MESSAGES)
    batches = render_rows(parts, MESSAGES, tokenizer, tally, checks, workers=workers)
    some, rest = ready(workers, batches), list(batches)
    assert len(rest) > 2
    assert (expected, alone) == (joined([*some, *rest]), tally)
    workers.close()  # a second time: nothing


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_early_workers_without_work_are_ended(tokenizer):
    """Fewer rows than the file had promised: nobody waits for a tokenizer that none needs."""
    before = descendants(os.getpid())
    workers, checks = Workers(tokenizer.directory, 2), RowChecks(tokenizer)
    rows = conversations(5)
    (batch,) = render_rows(rows, MESSAGES, tokenizer, Tally(), checks, workers=workers)
    assert batch.num_samples
    assert not workers.is_taught
    assert descendants(os.getpid()) == before


def test_a_worker_that_fails_ends_all(tokenizer, tmp_path):
    """One that leaves by a code is one sentence as well, and the others do not wait."""
    workers, checks = Workers(tokenizer.directory, 2), RowChecks(tokenizer)
    parts = all_parts(chats(tmp_path / "a.parquet"), MESSAGES)
    batches = render_rows(parts, MESSAGES, tokenizer, Tally(), checks, workers=workers)
    ready(workers, batches)
    requests, answers = workers._free.get()
    requests.write(b"no pickle")
    requests.flush()
    workers._free.put((requests, answers))
    with pytest.raises(DataError, match="ended by code 1"):
        list(batches)


def descendants(pid: int) -> set[int]:
    """Return the processes that one started, and those that they started."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that just ended
            for child in map(int, (task / "children").read_text().split()):
                found |= {child} | descendants(child)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_killed_worker_is_one_sentence_and_leaves_none(tokenizer):
    """A worker that the system kills ends the work with the next move; no other lives on."""
    before = descendants(os.getpid())
    workers, checks = Workers(tokenizer.directory, 2), RowChecks(tokenizer)
    rows = conversations(100) * 100
    batches = render_rows(rows, MESSAGES, tokenizer, Tally(), checks, workers=workers)
    ready(workers, batches)
    os.kill(descendants(workers._process.pid).pop(), signal.SIGKILL)
    with pytest.raises(DataError, match="signal 9, perhaps for want of memory"):
        list(batches)
    assert descendants(os.getpid()) == before


def test_rows_that_change_on_their_way_are_not_plain():
    """Nulls, thinking and what JSON does not know are prepared by transformers."""
    plain = {"role": "user", "content": "a"}
    assert is_plain([plain], None)
    assert is_plain([plain | {"tool_calls": [{"x": [1, 2.5, None, True]}]}], [{"name": "f"}])
    for odd in ({"name": None}, {"reasoning": "b"}, {"content": b"a"}, {"x": [{"y": (1,)}]}):
        assert not is_plain([plain | odd], None)
    assert not is_plain([plain], ["tool"])
    assert not is_plain([], None)


EXPRESSIONS = (
    "messages[0].content.strip('a')",
    "messages[0]['content'].split(' ')[0].upper()",
    "messages[0].missing is defined",
    "messages[0].missing",
    "messages[0]['missing'] is defined",
    "messages[0].items() | list",
    "messages[0].get('role')",
    "messages[0].content.missing is defined",
    "messages[1].calls[0].arguments.x",
    "messages[1].calls[0]['arguments'].y is defined",
    "messages[1].calls.count(1)",
    "messages[1].calls[0].index",
    "messages[1].calls[0].first",
    "messages[0].content.startswith('a ') and messages[0].content.endswith(messages[1].role)",
    "messages[0].content.replace('a', messages[1].content)",
    "messages[0].content.format(1)",
    "ns.found ~ ns.missing",
    "(messages | map(attribute='role') | join(','))",
    "messages[::-1][0].role",
    "('a' if messages[0].index0 is defined else 'b')",
    "namespace(role='c').role",
    "dict(role='d').role",
    "messages[0].content | length",
    "messages[0].content[0] ~ messages[0].content[-1:]",
)


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("place", ["{{ %s }}", LOOP, MACRO], ids=["top", "loop", "macro"])
def test_quick_code_prints_what_transformers_prints(tokenizer, monkeypatch, expression, place):
    """Fields, methods and loops that are read in place, and whatever looks like them."""
    start = "{% set ns = namespace(found=1) %}"
    messages = [
        {"role": "user", "content": "a b{} a"},
        {"role": "assistant", "content": "c", "calls": [{"index": 5, "arguments": {"x": "y"}}]},
    ]
    monkeypatch.setattr(tokenizer.fast, "chat_template", start + place % expression)
    expected = tokenizer.fast.apply_chat_template(messages, tokenize=False)
    assert expected == quick_render(tokenizer.fast)(messages, None)


def test_the_sandbox_still_stands(tokenizer):
    """What a template may not do is undefined or refused in the quick way too."""
    tokenizer.fast.chat_template, kept = "{{ messages.__class__ }}", tokenizer.fast.chat_template
    try:
        for template in (
            "{{ messages[0].content.__class__.__mro__[1] }}",
            "{{ messages[0].content.format.__globals__.x }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'a': 1}) }}",
            "{{ messages[0]['__class__'].x }}",
            "{{ messages[0].content['__class__'].x }}",
            "{{ '{0.__class__.x}'.format(messages[0]) }}",
        ):
            tokenizer.fast.chat_template = template
            render = quick_render(tokenizer.fast)
            with pytest.raises(Exception, match=r"unsafe|not safely|ndefined"):
                render([{"role": "user", "content": "a"}], None)
    finally:
        tokenizer.fast.chat_template = kept
