"""The console script `llmc`."""

from llmc_runtime.entry import call


def main() -> int:
    """Run a command; see `llmc.cli.main`."""
    return call("llmc.cli", "main")
