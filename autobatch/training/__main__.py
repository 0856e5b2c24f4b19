"""The process that torchrun starts on each rank: `-m autobatch.training RUN_DIR ...`."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path


def main() -> int:
    """Train the config in a run directory; write error.json there if it cannot be done."""
    from autobatch.jobs import end_with_launcher

    end_with_launcher()  # before the imports that take seconds
    from autobatch.config import load_config, resolve
    from autobatch.errors import AutobatchError
    from autobatch.training.guards import report_error
    from autobatch.training.loop import Progress, train

    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--memory-limit-bytes", type=int, required=True)
    arguments = parser.parse_args()
    progress = Progress()
    try:
        train(
            resolve(load_config(arguments.run_dir / "config.yaml")),
            arguments.run_dir,
            cache_dir=arguments.cache_dir,
            memory_limit_bytes=arguments.memory_limit_bytes,
            num_ranks=int(os.environ.get("WORLD_SIZE", 1)),
            progress=progress,
        )
    except Exception as error:
        exit_code = report_error(arguments.run_dir, error, step=progress.step)
        if not isinstance(error, AutobatchError):
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(exit_code)  # a collective of another rank must not hold this process
    return 0


if __name__ == "__main__":
    sys.exit(main())
