"""Our server over the simulated device, as a process: `python -m bench.serving.front SECONDS_PER_STEP DEPTH`."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from llmc_runtime import AsyncLLM
from llmc_runtime.api.async_front import Front
from llmc_runtime.engine.messages import Open
from llmc_runtime.server.run_server import serve_over
from llmc_runtime.server.server_options import Options
from llmc_runtime.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "demo-model"
_BOOT = (
    "import runpy, sys; sys.path[:] = sys.argv.pop(1).split(':'); "
    "runpy.run_module('bench.serving.engine', run_name='__main__', alter_sys=True)"
)


def simulated(pace: float, depth: int, rows: int | None = None, **options: Any) -> AsyncLLM:
    """Return an AsyncLLM whose engine is `bench.serving.engine`; it is not started."""
    command = [sys.executable, "-P", "-c", _BOOT, ":".join(filter(None, sys.path)), str(pace), str(depth)]
    opening = Open("simulated", {} if rows is None else {"max_num_seqs": rows})
    calm = {"heartbeat_timeout": 20.0, "say": lambda line: None}
    return AsyncLLM.over(Front(command, opening, Tokenizer.open(MODEL)), **(calm | options))


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    options = Options("simulated", max_queued_requests=20_000)
    asyncio.run(serve_over(simulated(float(sys.argv[1]), int(sys.argv[2])), options, listening))
