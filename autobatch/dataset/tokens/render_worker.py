"""Render batches of rows that the parent sends, in processes of their own.

One process loads the tokenizer, then forks: loading is paid once, and what was loaded lies in
memory once. Each fork serves two pipes. Frames are pickles between a process and its own
children: the tokenizer directory on stdin of the first, then (format, trust, how rows are
checked); then (number of the first row, pickled lists of rows) to a fork, answered by
(SampleBatch, Tally, RowTally) or by an error.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO

from autobatch.dataset.tokens.encoding import Trust
from autobatch.dataset.tokens.rendering import Renderer
from autobatch.dataset.tokens.row_checks import RowChecks, RowTally
from autobatch.dataset.tokens.tokenizer import load_tokenizer, with_bpe
from autobatch.dataset.tokens.turns import Tally
from autobatch.dataset.tokens.workers import unpacked
from autobatch.errors import AutobatchError


def serve(
    renderer: Renderer, checks: RowChecks, trust: Trust, requests: BinaryIO, answers: BinaryIO
) -> None:
    """Answer until the parent closes its end, or is gone."""
    while True:
        try:
            number, blobs = pickle.load(requests)
        except EOFError:
            return
        renderer.trust = replace(trust)  # each batch alike, whichever worker gets it
        answer = _answer(renderer, checks, number, blobs)
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


def _answer(renderer: Renderer, checks: RowChecks, number: int, blobs: list[bytes]) -> object:
    tally, checks.tally = Tally(), RowTally()
    try:
        return renderer.render(unpacked(blobs), tally, first_number=number), tally, checks.tally
    except AutobatchError as error:
        return error
    except BaseException:  # our fault, or a panic of Rust; the parent tells it with these words
        return traceback.format_exc()


def _fork(
    renderer: Renderer, checks: RowChecks, trust: Trust, pipes: list[tuple[int, int]], own: int
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        for i, ends in enumerate(pipes):
            if i != own:  # a pipe ends when nobody holds it any more
                for end in ends:
                    os.close(end)
        requests, answers = pipes[own]
        serve(renderer, checks, trust, os.fdopen(requests, "rb"), os.fdopen(answers, "wb"))
        code = 0
    except BrokenPipeError:  # the parent is gone
        pass
    finally:
        os._exit(code)


def main() -> None:
    """Load the tokenizer, fork a worker for each pair of pipes, wait for them.

    Arguments are descriptors: requests and answers of the first worker, of the second ...
    A worker that dies ends all; the exit code is 128 and its signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent keeps what is done, then ends us
    numbers = [int(word) for word in sys.argv[1:]]
    pipes = list(zip(numbers[::2], numbers[1::2], strict=True))
    tokenizer = with_bpe(load_tokenizer(pickle.load(sys.stdin.buffer)))  # once, for all forks
    # before any fork: one thread a worker, and the threads of this process are not in a fork
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        fmt, trust, (turn_by_turn, num_rows) = pickle.load(sys.stdin.buffer)
    except EOFError:  # there were fewer rows than it had seemed
        return
    checks = RowChecks(tokenizer, turn_by_turn=turn_by_turn, num_rows=num_rows)
    renderer = Renderer(fmt, tokenizer, checks)
    workers = [_fork(renderer, checks, trust, pipes, i) for i in range(len(pipes))]
    os.write(1, b"\n")  # ready
    for ends in pipes:
        for end in ends:
            os.close(end)
    for _ in workers:
        _, status = os.wait()
        if status:
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else 1)


if __name__ == "__main__":
    main()
