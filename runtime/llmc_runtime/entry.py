"""The console scripts: they import a command, during which Ctrl-C ends the process without a traceback, and run it."""

import signal
from importlib import import_module


def run() -> int:
    """Run the script `llmc-run`."""
    return call("llmc_runtime.cli", "main_run")


def serve() -> int:
    """Run the script `llmc-serve`."""
    return call("llmc_runtime.cli", "main_serve")


def call(module: str, function: str) -> int:
    """Import a module, and return what its function returns.

    While it is imported, SIGINT has its default action, unless it is ignored.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = getattr(import_module(module), function)
    signal.signal(signal.SIGINT, handler)
    return main()
