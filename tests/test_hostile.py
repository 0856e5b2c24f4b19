"""What nobody writes on purpose: one sentence, or the row is skipped; never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from tiny import CHATML, train_tokenizer, write_jsonl

from autobatch.cli import main
from autobatch.cli.options import Entry, split_settings
from autobatch.cli.screen import plain_errors
from autobatch.config import load_config
from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.rows.files import find_files, read_rows
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.dataset.tokens.tokenizer import load_tokenizer
from autobatch.dataset.tokens.tokenizer_files import tokenizer_digest
from autobatch.errors import AutobatchError, ConfigError, DataError, ModelError
from autobatch.model import read_model_spec
from autobatch.records import LengthProfile
from autobatch.storage import (
    append_jsonl,
    cache_root,
    from_plain,
    read_json,
    read_jsonl,
    to_plain,
    write_json,
)
from autobatch.units import parse_size

DEEP = "[" * 100_000
ROWS = [{"question": "What is two?", "answer": "Two."}] * 3
NOBODY = 65534


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(train_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small data file, with a cache of its own."""
    monkeypatch.setenv("AUTOBATCH_CACHE", str(tmp_path / "cache"))
    return write_jsonl(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def forbid() -> Iterator[Any]:
    """Take every permission from a path; root, whom modes do not bind, becomes nobody."""
    paths = []

    def take(path: Path) -> None:
        paths.append((path, path.stat().st_mode))
        path.chmod(0)
        if os.geteuid() == 0:
            for parent in path.parents:
                paths.append((parent, parent.stat().st_mode))
                parent.chmod(0o755)  # nobody reaches the path itself
                if parent.name.startswith("pytest-of-"):
                    break
            os.seteuid(NOBODY)

    yield take
    os.seteuid(os.getuid())
    for path, mode in paths:
        path.chmod(mode)


# ---- files -------------------------------------------------------------------


def test_a_pipe_is_no_data_file(tmp_path: Path) -> None:
    """Opening it would wait for ever."""
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="is no regular file"):
        find_files([str(tmp_path / "rows.jsonl")])


@pytest.mark.parametrize("read", [read_json, lambda path: load_config(path)])
def test_a_pipe_is_no_record(tmp_path: Path, read: Any) -> None:
    """A profile or config is read from a regular file."""
    os.mkfifo(tmp_path / "a")
    with pytest.raises(AutobatchError, match="it is no regular file"):
        read(tmp_path / "a")


@pytest.mark.parametrize("name", ["x" * 300 + ".jsonl", "~nosuchuser/rows.jsonl", "a\0b.jsonl"])
def test_a_path_that_cannot_be_is_one_sentence(name: str) -> None:
    """Too long, in the home of nobody, or with a null character."""
    with pytest.raises(AutobatchError):
        find_files([name])


@pytest.mark.parametrize("name", ["", "rows.jsonl"])
def test_unreadable_data_is_one_sentence(tmp_path: Path, forbid: Any, name: str) -> None:
    """A folder or a file without permissions."""
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(folder / "rows.jsonl", ROWS)
    forbid(folder / name)
    with pytest.raises(DataError, match="Permission denied; check the path"):
        find_files([str(folder)])


def test_a_file_inside_an_unreadable_folder_is_one_sentence(tmp_path: Path, forbid: Any) -> None:
    """It is not said to be missing."""
    (tmp_path / "data").mkdir()
    forbid(tmp_path / "data")
    with pytest.raises(DataError, match="Permission denied"):
        find_files([str(tmp_path / "data" / "rows.jsonl")])


def test_a_file_that_vanished_is_one_sentence(tmp_path: Path) -> None:
    """Between finding it and reading it."""
    (file,) = find_files([write_jsonl(tmp_path / "rows.jsonl", ROWS)])
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(DataError, match="No such file"):
        next(read_rows(file))


def test_a_line_that_cannot_be_appended_is_one_sentence(tmp_path: Path) -> None:
    """Its folder is a file."""
    (tmp_path / "out").write_text("")
    with pytest.raises(AutobatchError, match="cannot write"):
        append_jsonl(tmp_path / "out" / "trials.jsonl", {})


@pytest.mark.parametrize("line", [DEEP, "[1]", "{", "9" * 5000])
def test_a_damaged_line_of_records_is_one_sentence(tmp_path: Path, line: str) -> None:
    """Nested too deeply, no object, cut, or a number beyond Python's digits."""
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(AutobatchError, match="remove that line"):
        list(read_jsonl(tmp_path / "a.jsonl"))


def test_a_cache_in_the_home_of_nobody_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """AUTOBATCH_CACHE=~nosuchuser/x."""
    monkeypatch.setenv("AUTOBATCH_CACHE", "~nosuchuser/x")
    with pytest.raises(AutobatchError, match="write the whole path"):
        cache_root()


def test_a_file_name_that_is_no_utf8_survives_json(tmp_path: Path) -> None:
    """Linux allows any bytes in a name."""
    name = os.fsdecode(b"rows-\xff.jsonl")
    write_json(tmp_path / "a.json", {"files": [name]})
    append_jsonl(tmp_path / "a.jsonl", {"files": [name]})
    assert {"files": [name]} == read_json(tmp_path / "a.json")
    assert [{"files": [name]}] == list(read_jsonl(tmp_path / "a.jsonl"))


# ---- records -----------------------------------------------------------------


@pytest.fixture(scope="module")
def plain_profile(tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("profile")
    data = write_jsonl(folder / "rows.jsonl", ROWS)
    return to_plain(profile_lengths([data], tokenizer_dir=tokenizer))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("data.files", 5),
        ("data.files", None),
        ("data.files", [1]),
        ("data.files", "abc"),
        ("data.keys", None),
        ("data", []),
        ("histogram", 5),
        ("histogram", [[1]]),
        ("histogram", [[1, "2"]]),
        ("max_length.curve", None),
        ("max_length.curve", [3]),
        ("length.max", "9"),
        ("length.max", 9.5),
        ("length.mean", "9"),
        ("num_rows", True),
        ("complete", 1),
        ("tokenizer", None),
        ("model", 5),
        ("skipped", []),
        ("skipped", {"a": "b"}),
        ("warnings", 5),
        ("schema_version", [2]),
    ],
)
def test_a_wrong_type_in_a_record_names_its_place(
    plain_profile: dict[str, Any], place: str, value: Any
) -> None:
    """Containers and scalars alike."""
    damaged = json.loads(json.dumps(plain_profile))
    *parents, last = place.split(".")
    section = damaged
    for name in parents:
        section = section[name]
    section[last] = value
    with pytest.raises(AutobatchError, match=rf"p\.json.*{last}"):
        from_plain(LengthProfile, damaged, where="p.json")


def test_a_sound_record_reads_back(plain_profile: dict[str, Any]) -> None:
    """Checking refuses nothing that was written."""
    assert plain_profile == to_plain(from_plain(LengthProfile, plain_profile, where="p.json"))


@pytest.mark.parametrize("name", ["profile.json", "meta.json"])
@pytest.mark.parametrize("text", [DEEP, "{}", "null", "[]", "", '{"version": 1, "files": 3}'])
def test_a_damaged_cache_is_rebuilt_silently(
    tokenizer: str, data: str, name: str, text: str
) -> None:
    """Whatever is wrong in its own files."""
    profile = profile_lengths([data], tokenizer_dir=tokenizer)
    assert profile.cache_dir is not None
    (Path(profile.cache_dir) / name).write_text(text)
    assert profile == profile_lengths([data], tokenizer_dir=tokenizer)
    TokenCache.open(profile.cache_dir)


@pytest.mark.parametrize("count", [10**30, -1, 1e400, "x"])
def test_impossible_counts_of_a_cache_are_damage(tokenizer: str, data: str, count: Any) -> None:
    """No overflow, no negative size."""
    profile = profile_lengths([data], tokenizer_dir=tokenizer)
    assert profile.cache_dir is not None
    meta = read_json(Path(profile.cache_dir) / "meta.json")
    write_json(Path(profile.cache_dir) / "meta.json", {**meta, "num_samples": count})
    with pytest.raises(DataError, match="damaged; run autobatch profile again"):
        TokenCache.open(profile.cache_dir)


def test_garbage_of_the_right_size_is_damage(tokenizer: str, data: str) -> None:
    """Lengths must add up to the tokens."""
    profile = profile_lengths([data], tokenizer_dir=tokenizer)
    assert profile.cache_dir is not None
    table = Path(profile.cache_dir) / "samples.bin"
    table.write_bytes(b"\x7f" * table.stat().st_size)
    with pytest.raises(DataError, match="damaged"):
        TokenCache.open(profile.cache_dir)


def test_an_unreadable_cache_is_damage(tokenizer: str, data: str, forbid: Any) -> None:
    """Its next move is to profile again, which writes it anew."""
    profile = profile_lengths([data], tokenizer_dir=tokenizer)
    assert profile.cache_dir is not None
    forbid(Path(profile.cache_dir))
    with pytest.raises(DataError, match="run autobatch profile again"):
        TokenCache.open(profile.cache_dir)


def test_what_killed_writers_left_is_removed(tokenizer: str, data: str) -> None:
    """A folder of a dead process, or a day old; that of a living one stays."""
    profile_lengths([data], tokenizer_dir=tokenizer)
    tokens = cache_root() / "tokens"
    host = os.uname().nodename
    ended = subprocess.Popen(["true"])
    ended.wait()
    folders = {
        "dead": tokens / f".writing-{host}-{ended.pid}-abc",
        "old": tokens / ".writing-elsewhere-1-abc",
        "alive": tokens / f".writing-{host}-{os.getpid()}-abc",
        "elsewhere": tokens / f".writing-elsewhere-{ended.pid}-abc",
    }
    for folder in folders.values():
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(b"")
    day_ago = time.time() - 90_000
    for path in (folders["old"] / "tokens.bin", folders["old"]):
        os.utime(path, (day_ago, day_ago))
    Path(data).write_text('{"question": "a", "answer": "b"}\n')
    profile_lengths([data], tokenizer_dir=tokenizer)
    assert ["alive", "elsewhere"] == [name for name, f in folders.items() if f.exists()]


# ---- rows and templates ------------------------------------------------------


@pytest.mark.parametrize("ids", [[99999999999999999999, 2], [-5, 2], [2**31, 2], [1.5, 2], None])
def test_impossible_ids_skip_their_row(tokenizer: str, data: str, ids: Any) -> None:
    """The other rows stay."""
    Path(data).write_text(json.dumps({"input_ids": [1, 2]}) + "\n" + json.dumps({"input_ids": ids}))
    profile = profile_lengths([data], tokenizer_dir=tokenizer)
    assert (1, 1) == (profile.num_samples, sum(profile.skipped.values()))


def test_a_date_that_python_cannot_hold_is_one_sentence(tokenizer: str, tmp_path: Path) -> None:
    """In a column that is read; in another it does not matter."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    when = pa.array([2**62], type=pa.timestamp("us"))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"when": when, "question": ["a"], "answer": ["b"]}), path)
    assert 1 == profile_lengths([str(path)], tokenizer_dir=tokenizer).num_samples
    with pytest.raises(DataError, match="when"):
        profile_lengths(
            [str(path)],
            tokenizer_dir=tokenizer,
            keys={"prompt_key": "question", "response_key": "when"},
        )


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_deep_json_text_skips_its_row(tokenizer: str, data: str, field: str) -> None:
    """Messages or tools given as JSON text."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    sound = {"messages": json.dumps(chat), "tools": ""}
    write_jsonl(Path(data), [sound, {**sound, field: DEEP}])
    profile = profile_lengths([data], tokenizer_dir=tokenizer)
    assert (1, 1) == (profile.num_samples, sum(profile.skipped.values()))


def test_deep_rows_are_read(tokenizer: str, data: str) -> None:
    """Their deep fields are no columns."""
    deep = '{"a":' * 700 + "1" + "}" * 700
    Path(data).write_text(f'{{"question": "a", "answer": "b", "more": {deep}}}\n')
    assert 1 == profile_lengths([data], tokenizer_dir=tokenizer).num_samples


@pytest.mark.parametrize(
    ("failing", "name"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 'a' * 10**15 }}", "MemoryError"),
    ],
)
def test_a_template_that_always_fails_is_one_sentence(
    tokenizer: str, tmp_path: Path, failing: str, name: str
) -> None:
    """When it is loaded."""
    folder = copy_tokenizer(tokenizer, tmp_path, template=CHATML + failing)
    with pytest.raises(ModelError, match=f"the chat template fails.*{name}"):
        load_tokenizer(str(folder))


def test_a_template_that_fails_on_a_row_skips_it(tokenizer: str, data: str, tmp_path: Path) -> None:
    """Whatever it raises, the row is counted as refused."""
    bad = "{% if messages[0].content == 'bad' %}{{ 1 / 0 }}{% endif %}"
    folder = copy_tokenizer(tokenizer, tmp_path, template=CHATML + bad)
    write_jsonl(Path(data), [*ROWS, {"question": "bad", "answer": "b"}])
    profile = profile_lengths([data], tokenizer_dir=str(folder))
    assert {"template refuses the row": 1} == profile.skipped


def copy_tokenizer(tokenizer: str, tmp_path: Path, *, template: str) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for path in Path(tokenizer).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_an_unreadable_tokenizer_is_one_sentence(
    tokenizer: str, tmp_path: Path, forbid: Any
) -> None:
    """tokenizer.json without permissions."""
    folder = copy_tokenizer(tokenizer, tmp_path, template=CHATML)
    forbid(folder / "tokenizer.json")
    with pytest.raises(ModelError, match="Permission denied"):
        tokenizer_digest(str(folder))


# ---- model -------------------------------------------------------------------

SHAPE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 4 * 10**30}, "hidden_size=4.* is nonsense"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648 is nonsense"),
        ({"intermediate_size": 2**31 - 1, "hidden_size": 2**30}, "beyond 10 trillion weights"),
        ({"architectures": 5}, "architectures=5 is no list of names"),
        ({"architectures": {"a": 1}}, "is no list of names"),
        ({"architectures": None, "model_type": ["a"]}, "names no model_type"),
        ({"vocab_size": float("inf")}, "no positive whole number"),
    ],
)
def test_an_impossible_model_config_is_one_sentence(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """No overflow later on."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | change))
    with pytest.raises(ModelError, match=words):
        read_model_spec(tmp_path)


def test_one_architecture_as_text_is_a_list_of_one(tmp_path: Path) -> None:
    """A frequent slip."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"architectures": "Qwen2ForCausalLM"}))
    assert 64 == read_model_spec(tmp_path).hidden_size


def test_a_deep_model_config_is_one_sentence(tmp_path: Path) -> None:
    """So is any other JSON file."""
    (tmp_path / "config.json").write_text(DEEP)
    with pytest.raises(ModelError, match="nested too deeply"):
        read_model_spec(tmp_path)
    with pytest.raises(AutobatchError, match="nested too deeply"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["", "config.json"])
def test_an_unreadable_model_is_one_sentence(tmp_path: Path, forbid: Any, name: str) -> None:
    """Folder or file."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    forbid(tmp_path / "model" / name)
    with pytest.raises(ModelError, match="Permission denied"):
        read_model_spec(tmp_path / "model")


@pytest.mark.parametrize("path", ["x" * 300, "~nosuchuser/m"])
def test_a_model_path_that_cannot_be_is_one_sentence(path: str) -> None:
    """Too long, or in the home of nobody."""
    with pytest.raises(AutobatchError):
        read_model_spec(path)


# ---- settings ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.seed=4294967296", "is above 4294967295"),
        ("optim.lr=inf", "no finite number"),
        ("optim.lr=.inf", "no finite number"),
        ("optim.weight_decay=inf", "no finite number"),
        ("optim.clip_grad=inf", "no finite number"),
        ("optim.warmup_steps_ratio=1.5", "is above 1"),
        ("trainer.total_epochs=10000001", "give 10000000 or less"),
        ("trainer.total_training_steps=99999999999999999999", "give 10000000 or less"),
        ("data.train_batch_size=99999999999999999999", "give 2147483647 or less"),
        ("optim.lr=1" + "0" * 400, "has the wrong type; give a number"),
        ("optim.lr=9" + "9" * 5000, "no finite number"),
        ("data.seed=0x" + "f" * 9000, "data.seed="),
        ("schema_version=x", "give a whole number"),
        ("data.train_files={a: 1}", "give a list such as"),
        ("optim.lr=${optim.lr}", "cannot be resolved"),
        (f"data.max_length={DEEP}", "has the wrong type"),
    ],
)
def test_an_impossible_setting_is_one_short_sentence(setting: str, words: str) -> None:
    """Value, rule and next move; the value is cut where it is long."""
    with pytest.raises(ConfigError) as caught:
        load_config(None, [setting])
    assert words in str(caught.value)
    assert 300 > len(str(caught.value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tuning: x", "tuning='x' has the wrong type; give the section that `autobatch tune`"),
        ("schema_version: x", "schema_version='x' has the wrong type; give a whole number"),
        ("a: &a [*a]", ""),
        (f"a: {DEEP}", "c.yaml is"),
    ],
)
def test_an_impossible_config_file_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    """Wrong types at the top, a list that holds itself, depth."""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml")
    assert words in str(caught.value)


@pytest.mark.parametrize("size", ["9" * 400 + "TiB", "9" * 30])
def test_a_size_beyond_any_memory_is_refused(size: str) -> None:
    """No overflow."""
    with pytest.raises(ConfigError, match="beyond any memory"):
        parse_size(size)


def test_a_long_setting_is_no_path() -> None:
    """Longer than a file name may be."""
    setting = "model.path=" + "x" * 5000
    assert ([], [setting]) == split_settings([setting])


# ---- the command line --------------------------------------------------------


@pytest.mark.parametrize("secs", ["nan", "inf", "-inf", "1e300"])
def test_no_time_to_wait_is_refused(secs: str) -> None:
    """A wrong call: exit code 2."""
    result = CliRunner().invoke(main, ["probe", "--model", "m", "--length", "8", "--seconds", secs])
    assert 2 == result.exit_code
    assert "is no time to wait" in result.stderr


def autobatch(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Any:
    """Run the command line as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "autobatch", *arguments],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **(env or {})},
        stderr=subprocess.PIPE,
        **options,
    )


def test_a_full_disk_under_stdout_is_one_sentence() -> None:
    """And leaving Python says nothing more."""
    with open("/dev/full", "wb") as full:
        result = autobatch("gpus", "--json", stdout=full)
    lines = result.stderr.decode().splitlines()
    assert (1, 1) == (result.returncode, len(lines))
    assert "cannot print the result: No space left on device" in lines[0]


def test_a_closed_stdout_is_no_fault() -> None:
    """`autobatch gpus >&-`: nothing is printed."""
    command = ["sh", "-c", '"$0" -m autobatch gpus >&-', sys.executable]
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, stderr=subprocess.PIPE)
    assert (0, b"") == (result.returncode, result.stderr)


def test_any_name_prints_on_any_terminal() -> None:
    """What it cannot show is escaped."""
    env = {"PYTHONIOENCODING": "latin-1:strict"}
    result = autobatch("profile", "данные.jsonl", "--model", "нет", env=env, stdout=subprocess.PIPE)
    assert 1 == result.returncode
    assert b"Traceback" not in result.stderr
    assert b"\\u043d" in result.stderr


def test_an_interrupt_before_the_command_began_is_an_interrupt() -> None:
    """While it still imports: 128 + SIGINT."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    group = Entry(commands={"x": click.Command("x", callback=interrupted)})
    result = CliRunner().invoke(group, ["x"])
    assert (130, "autobatch: interrupted\n") == (result.exit_code, result.stderr)


def test_an_unforeseen_fault_is_one_sentence_with_its_traceback_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is ours, and says so."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as caught, plain_errors():
        raise KeyError("lost")
    said = capsys.readouterr().err
    (file,) = tmp_path.glob("autobatch-fault-*.txt")
    assert 1 == caught.value.code
    assert "a fault of autobatch, KeyError: 'lost'; please report it" in said
    assert f"traceback in {file}" in said
    assert "Traceback" in file.read_text()


def test_an_unforeseen_answer_of_the_system_is_one_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Disk, permissions, network: not our fault, so no traceback."""
    with pytest.raises(SystemExit) as caught, plain_errors():
        open("/nowhere/at/all")  # noqa: SIM115
    assert 1 == caught.value.code
    assert "cannot use /nowhere/at/all: No such file or directory" in capsys.readouterr().err
