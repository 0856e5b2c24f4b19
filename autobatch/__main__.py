"""`python -m autobatch`."""

from autobatch.cli import main

if __name__ == "__main__":
    main()
