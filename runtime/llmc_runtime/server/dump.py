"""Diagnostics on SIGQUIT: writes stacks, tasks and open requests to stderr, but no text of requests."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from llmc_runtime.server.admin import state_of
from llmc_runtime.server.serving import Serving

_MOST_TASKS = 20  # kinds of tasks to list


def dump_on_quit(loop: asyncio.AbstractEventLoop, serving: Serving) -> None:
    """Install a handler for SIGQUIT.

    It writes the stacks of all threads at once, even if the event loop hangs, then the server's state, and finally
    forwards the signal to the engine process.
    """

    def rest() -> None:
        told = json.dumps({**state_of(serving), "tasks": _tasks()})
        print(f"llmc: state at SIGQUIT: {told}", file=sys.stderr, flush=True)
        if (pid := serving.llm.engine_pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGQUIT)

    loop.add_signal_handler(signal.SIGQUIT, rest)
    if sys.stderr is not None:
        faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)


def _tasks() -> dict[str, int]:
    """Count tasks by the place where they wait."""
    found: Counter[str] = Counter()
    for task in asyncio.all_tasks():
        coroutine: Any = task.get_coro()
        frames = task.get_stack(limit=1)
        at = f" at {Path(frames[0].f_code.co_filename).name}:{frames[0].f_lineno}" if frames else ""
        found[f"{getattr(coroutine, '__qualname__', 'task')}{at}"] += 1
    return dict(found.most_common(_MOST_TASKS))
