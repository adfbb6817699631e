"""llmc-serve over the simulated device, as a process: `serve_fake.py SECONDS_A_STEP SHUTDOWN_TIMEOUT`."""

from __future__ import annotations

import asyncio
import socket
import sys

from llmc_runtime.server.command import Options, serve_over

from tests.runtime.async_kit import fake
from tests.runtime.served import TOK

if __name__ == "__main__":
    options = Options("toy", shutdown_timeout=int(sys.argv[2]))
    asyncio.run(serve_over(fake(float(sys.argv[1]), tok=TOK), options, socket.create_server(("127.0.0.1", 0))))
