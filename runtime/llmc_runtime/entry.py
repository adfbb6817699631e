"""The console scripts: they import a command, during which Ctrl-C ends the process without a traceback, and run it."""

import signal
import sys
from importlib import import_module
from io import TextIOWrapper


def run() -> int:
    """Run the script `llmc-run`."""
    return call("llmc_runtime.cli", "main_run")


def serve() -> int:
    """Run the script `llmc-serve`."""
    return call("llmc_runtime.cli", "main_serve")


def call(module: str, function: str) -> int:
    """Import a module, and return what its function returns.

    While it is imported, SIGINT has its default action, unless it is ignored. Characters that standard output cannot
    encode, such as bytes of a file name that are not UTF-8, are escaped.
    """
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = getattr(import_module(module), function)
    signal.signal(signal.SIGINT, handler)
    return main()
