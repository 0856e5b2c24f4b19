"""Data sets and tokenizers of the Hub, files behind URLs, and no network for local files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from autobatch.dataset.rows.files import find_files, read_columns, read_rows
from autobatch.dataset.rows.hub import HubData, parse_data, parse_model
from autobatch.errors import DataError
from tests.hub_server import COMMIT, OTHER_COMMIT, TOKEN, serve
from tests.tiny import train_tokenizer, write_jsonl, write_parquet

ROOT = Path(__file__).parent.parent
QA = {"question": "q", "answer": "a"}
LINE = b'{"question": "q", "answer": "a"}\n'
CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
# A set
"""
DATASETS = {
    "openai/gsm8k": {
        "README.md": CARD,
        "main/train-00000-of-00002.jsonl": LINE,
        "main/train-00001-of-00002.jsonl": LINE * 2,
        "main/test-00000-of-00001.jsonl": LINE * 5,
        "socratic/train-00000-of-00001.jsonl": LINE * 7,
    },
    "me/plain": {
        ".gitattributes": b"",
        "train.jsonl": LINE * 3,
        "test.jsonl": LINE,
        "dataset_infos.json": b"{}",
    },
    "me/only-test": {"README.md": b"", "test.jsonl": LINE, "dev.jsonl": LINE},
    "me/twins": {"README.md": b"", "train.jsonl": LINE, "train.csv": b"question,answer\nq,a\n"},
    "me/empty": {"README.md": b"# nothing"},
    "me/folders": {"en/train.jsonl": LINE, "fr/train.jsonl": LINE},
    "me/gated": {"README.md": b"", "train.jsonl": LINE},
}
ASK = """
import json, sys
from autobatch.dataset.rows.files import find_files, read_rows, revision_of
from autobatch.dataset.rows.hub import fetch_model, parse_model
from autobatch.errors import AutobatchError
for name in sys.argv[1:]:
    try:
        if name.startswith("model "):
            answer = fetch_model(*parse_model(name[6:]))
        else:
            files = find_files([name])
            rows = [len(list(read_rows(file))) for file in files]
            answer = [[file.path for file in files], rows, revision_of(files)]
    except AutobatchError as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    """A small tokenizer."""
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def hub(tokenizer_dir):
    """(endpoint, requests) of a Hub."""
    files = {path.name: path.read_bytes() for path in tokenizer_dir.iterdir()}
    files |= {"model.safetensors": b"weights", "config.json": b"{}"}
    models = {"me/model": files, "me/locked": files}
    with serve(DATASETS, models, gated=("me/gated", "me/locked")) as served:
        yield served


def environment(home: Path, endpoint: str, **more: str) -> dict[str, str]:
    """Return an environment whose Hub and caches are ours."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "AUTOBATCH_CACHE": str(home / "autobatch"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "no_proxy": "*",
        **more,
    }


def ask(home: Path, endpoint: str, *names: str, **more: str) -> list:
    """Return for each name [paths, rows of each, revision], or the error as text."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, *names],
        cwd=home,
        env=environment(home, endpoint, **more),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert 0 == done.returncode, done.stderr
    assert "Traceback" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- names -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai/gsm8k", HubData(repo="openai/gsm8k")),
        ("openai/gsm8k:main", HubData(repo="openai/gsm8k", config="main")),
        ("openai/gsm8k:main:test", HubData(repo="openai/gsm8k", config="main", split="test")),
        ("a/b@v1", HubData(repo="a/b", revision="v1")),
        ("a/b:c@refs/pr/1", HubData(repo="a/b", config="c", revision="refs/pr/1")),
        ("hf://datasets/a/b", HubData(repo="a/b")),
        (
            "hf://datasets/a/b@v1/x/*.parquet",
            HubData(repo="a/b", revision="v1", path="x/*.parquet"),
        ),
        ("https://huggingface.co/datasets/a/b", HubData(repo="a/b")),
        ("https://huggingface.co/datasets/a/b/viewer/main/train", HubData(repo="a/b")),
        (
            "https://huggingface.co/datasets/a/b/resolve/main/x/y.parquet?download=true",
            HubData(repo="a/b", revision="main", path="x/y.parquet"),
        ),
    ],
)
def test_a_name_of_the_hub_is_understood(name, expected):
    """An id with config, split, revision; a URL; the address of a page."""
    assert expected == parse_data(name)


@pytest.mark.parametrize(
    "name",
    [
        "https://mirror.example/datasets/a/b",
        "a/b.jsonl",
        "./a/b",
        "/a/b",
        "a/b/c",
        "gsm8k",
        "a/*",
        "s3://a/b",
        "~/a",
        "a b/c",
    ],
)
def test_other_names_are_paths(name):
    """Nothing is asked of the Hub for them."""
    assert None is parse_data(name)


def test_what_is_here_wins_over_the_hub(tmp_path, monkeypatch):
    """A folder that exists is that folder, and a misspelled path in one is a path."""
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert [None] * 3 == [
        parse_data("openai/gsm8k"),
        parse_data("openai/gsm8"),
        parse_model("openai/gsm8k"),
    ]
    assert ("a/b", "v1") == parse_model("a/b@v1")


# ---- data sets of the Hub --------------------------------------------------------


def test_the_files_of_a_split_are_fetched_by_their_commit(tmp_path, hub):
    """Config, split and revision choose; the commit is pinned into paths and record."""
    endpoint, _ = hub
    at = f"hf://datasets/openai/gsm8k@{COMMIT}"
    shards = [f"{at}/main/train-0000{i}-of-00002.jsonl" for i in (0, 1)]
    plain = f"hf://datasets/me/plain@{COMMIT}/train.jsonl"
    expected = {
        "openai/gsm8k:main": [shards, [1, 2], COMMIT],
        "openai/gsm8k:main:test": [[f"{at}/main/test-00000-of-00001.jsonl"], [5], COMMIT],
        "hf://datasets/openai/gsm8k/socratic": [
            [f"{at}/socratic/train-00000-of-00001.jsonl"],
            [7],
            COMMIT,
        ],
        "me/folders:fr": [[f"hf://datasets/me/folders@{COMMIT}/fr/train.jsonl"], [1], COMMIT],
        "hf://datasets/openai/gsm8k/**/train-*-of-00002.jsonl": [shards, [1, 2], COMMIT],
        shards[1]: [[shards[1]], [2], COMMIT],
        "me/plain": [[plain], [3], COMMIT],
        "me/plain@v1": [[plain.replace(COMMIT, OTHER_COMMIT)], [3], OTHER_COMMIT],
    }
    assert list(expected.values()) == ask(tmp_path, endpoint, *expected)


def test_what_cannot_be_told_is_refused_with_the_choice(tmp_path, hub):
    """Several configs, no train split, two kinds, no data, no such file: each one sentence."""
    endpoint, _ = hub
    expected = {
        "openai/gsm8k": "has 2 configs: main, socratic; name one, as openai/gsm8k:main",
        "openai/gsm8k:man": "has no config 'man'; it has main, socratic",
        "openai/gsm8k:main:dev": "has no split 'dev'; it has train, test: name one",
        "me/folders": "has 2 configs: en, fr; name one, as me/folders:en",
        "me/only-test": "has no split 'train'; it has validation, test: name one, as "
        "me/only-test:default:validation",
        "me/twins": "mixes csv and JSON files, perhaps the same rows twice",
        "me/empty": "json or csv file; try me/empty@refs/convert/parquet",
        "hf://datasets/me/plain/tain.jsonl": "has no data file tain.jsonl; it has",
        "me/plain@v2": "has no revision 'v2'; look at",
        "me/nothing": "is neither a path here nor a data set that http://127.0.0.1",
        "me/gated": "is gated, and no token is set; ask for access at http://127.0.0.1",
        "model me/locked": "is gated, and no token is set; ask for access at http://127.0.0.1",
        "model me/nothing": "is neither a path here nor a model that http://127.0.0.1",
    }
    answers = ask(tmp_path, endpoint, *expected)
    for (name, words), answer in zip(expected.items(), answers, strict=True):
        kind = "ModelError: " if name.startswith("model ") else "DataError: "
        assert isinstance(answer, str), name
        assert answer.startswith(kind)
        assert words in answer
        assert "\n" not in answer
    with_token = ask(tmp_path, endpoint, "me/gated", "me/nothing", HF_TOKEN=TOKEN)
    assert "is gated, and the token in use was not let in" in with_token[0]
    assert "shows to the token in use" in with_token[1]


def test_offline_the_cache_answers(tmp_path, hub):
    """What was fetched is read without the network; the rest is refused, saying where to get it."""
    endpoint, requests = hub
    names = [
        "openai/gsm8k:main",
        f"hf://datasets/openai/gsm8k@{COMMIT}/main/train-*",
        "model me/model",
    ]
    online = ask(tmp_path, endpoint, *names)
    asked = len(requests)
    more = ["openai/gsm8k:socratic", "me/plain", "model me/other"]
    offline = ask(tmp_path, endpoint, *names, *more, HF_HUB_OFFLINE="1")
    dead = ask(tmp_path, "http://127.0.0.1:9", *names, "me/plain")
    assert asked == len(requests)
    assert online == offline[:3] == dead[:3]
    assert "is in the Hub's cache without socratic/" in offline[3]
    assert "nor in the Hub's cache" in offline[4]
    assert "HF_HUB_OFFLINE is set; unset it, or fetch" in offline[4]
    assert "hf download me/plain --repo-type dataset" in offline[4]
    assert offline[5].startswith("ModelError: me/other is neither a path here nor in")
    assert "http://127.0.0.1:9 cannot be reached" in dead[3]
    assert "set HF_ENDPOINT to a mirror" in dead[3]


def test_a_cache_without_all_shards_is_not_taken_for_the_whole(tmp_path, hub):
    """Offline, after another program fetched one of two files."""
    endpoint, _ = hub
    fetch = (
        "from huggingface_hub import hf_hub_download as f\n"
        "for name in ('README.md', 'main/train-00000-of-00002.jsonl'):\n"
        "    f('openai/gsm8k', name, repo_type='dataset')"
    )
    env = environment(tmp_path, endpoint)
    subprocess.run([sys.executable, "-c", fetch], env=env, check=True, capture_output=True)
    (answer,) = ask(tmp_path, endpoint, "openai/gsm8k:main", HF_HUB_OFFLINE="1")
    assert "is only in part in the Hub's cache (1 of 2 files of main/train)" in answer


def test_a_profile_of_the_hub_names_its_commit_and_reads_no_weights(tmp_path, hub):
    """`profile` with data and model of the Hub."""
    endpoint, requests = hub
    asked = len(requests)
    command = [sys.executable, "-m", "autobatch", "profile", "--json", "--model", "me/model"]
    env = environment(tmp_path, endpoint)
    done = subprocess.run(
        [*command, "openai/gsm8k:main"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert 0 == done.returncode, done.stderr
    profile = json.loads(done.stdout)
    assert COMMIT == profile["data"]["revision"]
    assert 3 == profile["num_rows"]
    assert Path(profile["model"]).name == COMMIT
    assert not [r for r in requests[asked:] if "safetensors" in r]


# ---- URLs ---------------------------------------------------------------------


@pytest.fixture
def bucket():
    """A file system of fsspec that lives in memory."""
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def test_files_behind_urls_are_streamed(tmp_path, bucket):
    """Parquet, packed lines, a folder and a glob; the version changes with the content."""
    import gzip

    write_parquet(tmp_path / "a.parquet", [QA] * 3)
    bucket.pipe("/data/a.parquet", (tmp_path / "a.parquet").read_bytes())
    bucket.pipe("/lines/b.jsonl.gz", gzip.compress(LINE * 2))
    bucket.pipe("/lines/README.md", b"lines")
    (parquet,) = find_files(["memory://data/a.parquet"])
    (lines,) = find_files(["memory://lines/*.gz"])
    assert (lines,) == find_files(["memory://lines"])
    assert {"question": "text", "answer": "text"} == read_columns(parquet)
    assert ([QA] * 3, [QA] * 2) == (list(read_rows(parquet)), list(read_rows(lines)))
    bucket.pipe("/data/a.parquet", (tmp_path / "a.parquet").read_bytes())
    assert find_files(["memory://data/a.parquet"])[0].identity != parquet.identity
    with pytest.raises(DataError, match="changed while it was read"):
        list(read_rows(parquet))


@pytest.fixture
def web():
    """(address, files, bytes sent) of a web server that sends ranges."""
    files: dict[str, bytes] = {}
    sent = [0]

    class Web(BaseHTTPRequestHandler):
        def log_message(self, *_):
            return

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            body = files.get(self.path.partition("?")[0].strip("/"))
            if body is None:
                self.send_error(404)
                return
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            start, end = (int(wanted[1]), int(wanted[2])) if wanted else (0, len(body) - 1)
            part = body[start : end + 1]
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Content-Range", f"bytes {start}-{end}/{len(body)}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", hashlib.sha1(body).hexdigest())
            self.end_headers()
            if self.command == "GET":
                sent[0] += len(part)
                self.wfile.write(part)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", files, sent
    server.shutdown()
    server.server_close()


def test_parquet_of_the_web_is_not_fetched_whole(tmp_path, web):
    """Only what is asked for: the footer, the columns, and of them what is read."""
    pytest.importorskip("aiohttp")
    address, files, sent = web
    pictures = [{**QA, "image": os.urandom(2**20)} for _ in range(64)]
    write_parquet(tmp_path / "a.parquet", pictures)
    files["a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    files["b.jsonl"] = LINE * 3
    (file,) = find_files([f"{address}/a.parquet?token=x*"])
    assert 64 == len(list(read_rows(file, ["question", "answer"])))
    assert sent[0] < 48 * 2**20 < len(files["a.parquet"])
    (lines,) = find_files([f"{address}/b.jsonl"])
    assert [QA] * 3 == list(read_rows(lines))
    files["b.jsonl"] = LINE * 2 + b" " * len(LINE)  # as long as before
    with pytest.raises(DataError, match="changed while it was read"):
        list(read_rows(lines))
    with pytest.raises(DataError, match=r"c\.jsonl does not exist; check the path"):
        find_files([f"{address}/c.jsonl"])


def test_a_url_that_leads_nowhere_is_one_sentence(bucket):
    """A missing file, an empty glob, an unknown protocol."""
    for name, words in (
        ("memory://data/a.parquet", "does not exist; check the path"),
        ("memory://data/*.parquet", "names no file; check the path"),
        ("nosuch://a/b.parquet", "is no known protocol"),
    ):
        with pytest.raises(DataError, match=words):
            find_files([name])


@pytest.mark.parametrize(
    ("url", "module", "words"),
    [
        ("s3://bucket/a.parquet", "s3fs", "pip install s3fs, or copy it here: aws s3 cp s3://buck"),
        ("gs://bucket/a.parquet", "gcsfs", "pip install gcsfs, or copy it here: gcloud storage cp"),
        ("oss://bucket/a.parquet", "ossfs", "pip install ossfs, or copy it here: ossutil cp oss:"),
        ("https://a.b/c.parquet", "aiohttp", "pip install aiohttp, or copy it here: curl -LO http"),
    ],
)
def test_a_missing_plug_in_is_named_with_the_copy_command(monkeypatch, url, module, words):
    """The user can install it, or go without."""
    from fsspec.registry import registry

    for name in [n for n in sys.modules if n.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert url.partition("://")[0] not in registry
    with pytest.raises(DataError, match=words) as caught:
        find_files([url])
    assert "\n" not in str(caught.value)


# ---- no network -----------------------------------------------------------------

BLOCKED = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError(f"a network call: {args}")

class Unix(socket.socket):
    def connect(self, address):
        if self.family != socket.AF_UNIX:
            refuse(address)
        return super().connect(address)
    connect_ex = connect

socket.socket = Unix
socket.getaddrinfo = socket.create_connection = refuse
from autobatch.cli import main
main(sys.argv[1:])
"""


def test_a_local_profile_makes_no_network_call(tmp_path, tokenizer_dir):
    """Local files with a local tokenizer, and a wrong path in a folder that is here."""
    write_jsonl(tmp_path / "a.jsonl", [QA] * 3)
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"PYTHONPATH": str(ROOT), "AUTOBATCH_CACHE": str(tmp_path / "cache")}

    def run(data: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", BLOCKED, "profile", data, "--model", str(tokenizer_dir)]
        return subprocess.run(
            [*command, "--json"], cwd=tmp_path, env=env, capture_output=True, text=True
        )

    done = run("a.jsonl")
    assert (0, 3) == (done.returncode, json.loads(done.stdout)["num_rows"])
    wrong = run("b.jsonl")
    assert 1 == wrong.returncode
    assert "does not exist; check the path" in wrong.stderr
    assert "network" not in done.stderr + wrong.stderr
