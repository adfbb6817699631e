"""`python -m llmc_runtime`: the same as the command llmc-run."""

import sys

from llmc_runtime.entry import run

if __name__ == "__main__":
    sys.exit(run())
