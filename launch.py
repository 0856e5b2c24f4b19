"""The whole job in one command: `python launch.py DATA --model DIR`, as `autobatch run` does."""

import sys

from autobatch.cli import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]], prog_name="launch.py")
