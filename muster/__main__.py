"""`python -m muster` is `muster`."""

import sys

from muster.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
