"""`python -m bootfile VERB`: the command `bootfile`."""

import sys

from bootfile.cli import main

if __name__ == "__main__":
    sys.exit(main())
