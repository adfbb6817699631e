"""`python -m llmc`: the same as the command llmc."""

import sys

from llmc.entry import main

if __name__ == "__main__":
    sys.exit(main())
