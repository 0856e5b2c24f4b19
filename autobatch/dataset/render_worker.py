"""Render batches of rows that the parent sends, as a process of its own.

Frames are pickles between a process and the child it started: (format, tokenizer directory,
trust, how rows are checked) first, then (number of the first row, lists of rows). Each is
answered by (SampleBatch, Tally, RowTally), or by an error.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from dataclasses import replace
from typing import BinaryIO

from autobatch.dataset.rendering import Renderer
from autobatch.dataset.row_checks import RowChecks, RowTally
from autobatch.dataset.tokenizer import load_tokenizer
from autobatch.dataset.turns import Tally
from autobatch.errors import AutobatchError


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent closes its end, or is gone."""
    fmt, directory, trust, (turn_by_turn, num_rows) = pickle.load(requests)
    tokenizer = load_tokenizer(directory)
    checks = RowChecks(tokenizer, turn_by_turn=turn_by_turn, num_rows=num_rows)
    renderer = Renderer(fmt, tokenizer, checks)
    while True:
        try:
            first, blobs = pickle.load(requests)
            rows = [row for rows in blobs for row in pickle.loads(rows)]
        except EOFError:
            return
        renderer.trust = replace(trust)  # each batch alike, whichever worker gets it
        tally, checks.tally = Tally(), RowTally()
        try:
            answer: object = (renderer.render(rows, tally, first=first), tally, checks.tally)
        except AutobatchError as error:
            answer = error
        except Exception:  # our fault; the parent tells it with these words
            answer = traceback.format_exc()
        del rows
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()


def main() -> None:
    """Serve stdin and stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent keeps what is done, then ends us
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a worker
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    try:
        serve(sys.stdin.buffer, answers)
    except BrokenPipeError:  # the parent is gone
        os._exit(1)


if __name__ == "__main__":
    main()
