"""How fast rows become token lengths, beside the raw tokenizer and two usual ways.

    python benchmarks/bench_profile.py --data DIR --tokenizer DIR --out bench-out

The ways alternate on the same rows, everything in one process tree, and medians are compared:

- ours: `profile_lengths` with a cold cache (ids, labels, advice, cache written), start included
- ceiling: `encode_batch` of the texts that are already rendered, on as many threads
- datasets: `datasets.map(batched, num_proc)` with the chat template (left out where not installed)
- one-liner: `[len(tokenizer.encode(text)) for text in ...]` of pandas columns, row by row

Without --data the rows are made up. Wall and processor seconds are given: on a shared machine
the second is what can be compared. `--rows N` measures memory instead: a parquet file of N short
rows is generated, and the private memory of all processes is followed while it is profiled.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from autobatch.dataset.lengths.profiling import profile_lengths
from autobatch.dataset.rows.files import find_files
from autobatch.dataset.rows.formats import choose_format
from autobatch.dataset.rows.reading import all_rows
from autobatch.dataset.tokens.cache import TokenCache
from autobatch.dataset.tokens.tokenizer import Tokenizer, load_tokenizer
from autobatch.dataset.tokens.turns import Tally, as_text, row_messages, row_tools
from autobatch.hardware.environment import describe, num_cores

ROOT = Path(__file__).parent.parent
SETS = ("gsm8k", "sharegpt_zh", "messages_tools_agent", "alpaca_en", "text_longtail")
WAYS = ("ours", "ceiling", "datasets", "one-liner")
_CEILING_ROWS = 1000  # of one call of encode_batch
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "language", "model")


def cpu_secs() -> float:
    """Return the processor seconds of this process and of its children that ended."""
    own, ended = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def repeated(source: Path, target: Path, times: int) -> Path:
    """Write the rows of a parquet file several times over; each counts."""
    table = pq.read_table(source)
    with pq.ParquetWriter(target, table.schema) as writer:
        for _ in range(times):
            writer.write_table(table, row_group_size=10_000)
    return target


def made_up(target: Path, *, num_rows: int) -> Path:
    """Write question and answer rows of random words, log-normal in length."""
    rng = np.random.default_rng(0)

    def texts(median: float) -> list[str]:
        counts = np.exp(rng.normal(np.log(median), 0.6, num_rows)).astype(int) + 1
        return [" ".join(rng.choice(_WORDS, n)) for n in counts]

    pq.write_table(pa.table({"question": texts(40), "answer": texts(90)}), target)
    return target


def rendered(path: Path, tokenizer: Tokenizer) -> list[str]:
    """Return the text of every row, by transformers' own rendering."""
    found = find_files([str(path)])
    fmt = choose_format(found)
    texts = []
    for _, _, row in all_rows(found, fmt):
        if fmt.name == "text":
            texts.append(as_text(row["text"], "text"))
        else:
            messages = row_messages(row, fmt, Tally())
            texts.append(tokenizer.render(messages, tools=row_tools(row, fmt)))
    return texts


def ours(path: Path, tokenizer_dir: str) -> int:
    """Profile with a cold cache."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["AUTOBATCH_CACHE"] = cache
        return profile_lengths([str(path)], tokenizer_dir=tokenizer_dir).num_tokens


def ceiling(texts: list[str], tokenizer: Tokenizer) -> int:
    """Encode rendered texts."""
    num_tokens = 0
    for i in range(0, len(texts), _CEILING_ROWS):
        encodings = tokenizer.encode(texts[i : i + _CEILING_ROWS], add_special_tokens=False)
        num_tokens += sum(map(len, encodings))
    return num_tokens


def by_datasets(path: Path, tokenizer_dir: str) -> int:
    """Render and encode in a process of its own, as `datasets.map(batched, num_proc)`."""
    found = find_files([str(path)])
    fmt = choose_format(found)
    with tempfile.TemporaryDirectory() as cache:
        answer = subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / "profile_by_datasets.py")],
            input=json.dumps(
                {
                    "file": str(path),
                    "tokenizer": tokenizer_dir,
                    "num_proc": num_cores(),
                    "keys": fmt.keys,
                }
            ),
            env={
                **os.environ,
                "HF_DATASETS_CACHE": cache,
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            },
            capture_output=True,
            text=True,
            check=True,
        )
    return int(answer.stdout.split()[-1])


def one_liner(path: Path, tokenizer: Tokenizer) -> int:
    """Count the tokens of each row, one call a row, from a pandas frame."""
    frame = pq.read_table(path).to_pandas()
    texts = [
        frame[name] if frame[name].map(type).eq(str).all() else frame[name].map(str)
        for name in frame.columns
    ]
    joined = texts[0].str.cat(texts[1:]) if len(texts) > 1 else texts[0]
    return sum(len(tokenizer.fast.encode(text)) for text in joined)


def compare(
    name: str, path: Path, tokenizer_dir: str, *, asked: list[str], repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each way and repeat; the ways alternate."""
    tokenizer = load_tokenizer(tokenizer_dir)
    texts = rendered(path, tokenizer)
    ways: dict[str, Callable[[], int]] = {
        "ours": lambda: ours(path, tokenizer_dir),
        "ceiling": lambda: ceiling(texts, tokenizer),
        "datasets": lambda: by_datasets(path, tokenizer_dir),
        "one-liner": lambda: one_liner(path, tokenizer),
    }
    try:
        import datasets  # noqa: F401
    except ImportError:
        print("datasets is not installed: that way is left out", file=sys.stderr)
        del ways["datasets"]
    ways = {way: measure for way, measure in ways.items() if way in asked}
    for repeat in range(repeats):
        for way, measure in ways.items():
            cpu, start = cpu_secs(), time.perf_counter()
            num_tokens = measure()
            yield {
                "set": name,
                "way": way,
                "repeat": repeat,
                "num_rows": len(texts),
                "num_tokens": num_tokens,
                "secs": time.perf_counter() - start,
                "cpu_secs": cpu_secs() - cpu,
            }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print medians of each set, and ours over each other way."""
    print("set                   way        rows/s    tokens/s  wall s   cpu s  ours/way  by cpu")
    for name in dict.fromkeys(row["set"] for row in rows):
        of_set = [row for row in rows if row["set"] == name]
        wall, cpu = (
            {
                way: statistics.median(r[key] for r in of_set if r["way"] == way)
                for way in dict.fromkeys(r["way"] for r in of_set)
            }
            for key in ("secs", "cpu_secs")
        )
        for way, secs in wall.items():
            row = next(r for r in of_set if r["way"] == way)
            faster, leaner = secs / wall["ours"], cpu[way] / cpu["ours"]
            print(
                f"{name:21} {way:9} {row['num_rows'] / secs:7,.0f}"
                f" {row['num_tokens'] / secs:11,.0f} {secs:7.2f} {cpu[way]:7.2f}"
                f" {faster:9.2f} {leaner:7.2f}"
            )


# ---- memory ----------------------------------------------------------------


def short_rows(path: Path, *, num_rows: int) -> None:
    """Write `num_rows` texts of 1 to 30 words in a stream."""
    rng = np.random.default_rng(0)
    words = np.array(_WORDS)
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        for begin in range(0, num_rows, 100_000):
            counts = rng.integers(1, 31, min(100_000, num_rows - begin))
            drawn = iter(words[rng.integers(0, len(words), int(counts.sum()))].tolist())
            texts = [" ".join(next(drawn) for _ in range(n)) for n in counts.tolist()]
            writer.write_table(pa.table({"text": texts}))


def private_bytes(pid: int) -> dict[str, int]:
    """Return the bytes that a process and its children share with nobody: dirty, and all."""
    pids, seen = [pid], []
    while pids:
        one = pids.pop()
        seen.append(one)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    sums = {"Private_Dirty": 0, "Private_Clean": 0}
    for one in seen:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                name = line.split(":")[0]
                if name in sums:
                    sums[name] += int(line.split()[1]) * 1024
    dirty = sums["Private_Dirty"]
    return {"num_processes": len(seen), "dirty": dirty, "uss": dirty + sums["Private_Clean"]}


def follow(pid: int, stop: threading.Event) -> dict[str, int]:
    """Return the peaks of private memory until `stop`."""
    peaks = {"num_processes": 0, "dirty": 0, "uss": 0}
    while not stop.wait(0.5):
        now = private_bytes(pid)
        peaks = {name: max(peaks[name], now[name]) for name in peaks}
    return peaks


def memory(tokenizer_dir: str, *, num_rows: int) -> dict[str, Any]:
    """Return what one profile of many short rows takes, beside the tokenizer alone."""
    module = "autobatch.dataset.tokens.tokenizer"
    load = f"from {module} import load_tokenizer as l; t = l({tokenizer_dir!r})"
    idle = subprocess.Popen(
        [sys.executable, "-c", f"{load}; print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert idle.stdout is not None
    idle.stdout.readline()
    alone = private_bytes(idle.pid)
    idle.kill()
    idle.wait()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.parquet")
        short_rows(path, num_rows=num_rows)
        code = (
            "import sys; from autobatch.dataset.lengths.profiling import profile_lengths as p; "
            "print(p([sys.argv[1]], tokenizer_dir=sys.argv[2]).cache_dir)"
        )
        start = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(path), tokenizer_dir],
            env={**os.environ, "AUTOBATCH_CACHE": folder},
            stdout=subprocess.PIPE,
            text=True,
        )
        stop = threading.Event()
        peaks: dict[str, int] = {}
        watcher = threading.Thread(target=lambda: peaks.update(follow(child.pid, stop)))
        watcher.start()
        directory = child.communicate()[0].strip()
        secs = time.perf_counter() - start
        stop.set()
        watcher.join()
        profile = json.loads(Path(directory, "profile.json").read_text())
        lengths = np.sort(TokenCache.open(directory).lengths)
        exact = {f"p{p}": int(lengths[-(-len(lengths) * p // 100) - 1]) for p in (50, 90, 95, 99)}
        return {
            "num_rows": profile["num_rows"],
            "num_tokens": profile["num_tokens"],
            "secs": secs,
            "tokenizer_alone": alone,
            "peak": peaks,
            "length": profile["length"],
            "percentiles_are_exact": exact.items() <= profile["length"].items(),
        }


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of data sets, each with train.parquet")
    parser.add_argument("--sets", default=",".join(SETS), help="which of them, comma-separated")
    parser.add_argument("--ways", default=",".join(WAYS), help="what is compared, comma-separated")
    parser.add_argument("--tokenizer", required=True, help="tokenizer folder")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="rows repeat up to so many")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, help="measure memory with so many short rows instead")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    arguments = parser.parse_args()
    unknown = set(arguments.ways.split(",")) - set(WAYS)
    if unknown or "ours" not in arguments.ways.split(","):
        parser.error(f"--ways {arguments.ways}: name ours and any of {', '.join(WAYS[1:])}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    commit = (
        os.environ.get("AUTOBATCH_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
    )
    today = datetime.date.today().isoformat()
    about = {"date": today, "commit": commit, **describe(device="cpu")}
    with (arguments.out / "profile.jsonl").open("a", encoding="utf-8") as stream:
        print(json.dumps(about))
        if arguments.rows:
            row = memory(arguments.tokenizer, num_rows=arguments.rows)
            stream.write(json.dumps({**about, **row}) + "\n")
            print(json.dumps(row, indent=1))
            return
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for name in arguments.sets.split(",") if arguments.data else ["made_up"]:
                path = Path(folder, f"{name}.parquet")
                if arguments.data:
                    source = arguments.data / name / "train.parquet"
                    once = ours(source, arguments.tokenizer)
                    repeated(source, path, max(1, round(arguments.tokens / once)))
                else:
                    made_up(path, num_rows=arguments.tokens // 200)
                compared = compare(
                    name,
                    path,
                    arguments.tokenizer,
                    asked=arguments.ways.split(","),
                    repeats=arguments.repeats,
                )
                for row in compared:
                    stream.write(json.dumps({**about, **row}) + "\n")
                    stream.flush()
                    rows.append(row)
        print_table(rows)


if __name__ == "__main__":
    main()
