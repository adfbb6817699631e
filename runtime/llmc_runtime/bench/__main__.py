"""`python -m llmc_runtime.bench`: the same as `llmc bench`, for installations without the compiler."""

from __future__ import annotations

import sys

from llmc_runtime.cli import main_bench

if __name__ == "__main__":
    sys.exit(main_bench())
