"""The end of a run that cannot go on, told in one sentence for its launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path

from autobatch.engine.step import NonFiniteError
from autobatch.errors import AutobatchError
from autobatch.oom import out_of_memory_kind

FILE_NAME = "error.json"


def report_error(directory: Path, error: BaseException, *, step: int | None) -> int:
    """Write why this rank ends, unless another rank already did; return the exit code.

    An error that is not the user's is left to its traceback.
    """
    exit_code = 1
    where = "before the first step" if step is None else f"at step {step}"
    if isinstance(error, AutobatchError):
        message, exit_code = str(error), error.exit_code
    elif out_of_memory_kind(error):
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message, exit_code = f"training ran out of memory {where}: {first}", 3
    elif isinstance(error, NonFiniteError):
        message = (
            f"training stopped {where} before the weights changed: {error}; lower optim.lr, "
            "look at the rows of that step, or continue from the last checkpoint"
        )
    else:
        message = f"training failed {where}: {type(error).__name__}: {error}"
    line = json.dumps(
        {"message": message, "exit_code": exit_code, "rank": int(os.environ.get("RANK", 0))}
    )
    try:
        handle = os.open(directory / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return exit_code
    with os.fdopen(handle, "w") as stream:
        stream.write(line)
    return exit_code
