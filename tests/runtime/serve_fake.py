"""llmc-serve over the simulated device, as a process: `serve_fake.py SECONDS_A_STEP SHUTDOWN_TIMEOUT [OPTION ...]`."""

from __future__ import annotations

import asyncio
import os
import sys

from llmc_runtime.server.config import options_of, read
from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.http.listen import listening
from llmc_runtime.server.http.tls import context_of
from llmc_runtime.server.run_server import serve_over, tracer_of

from tests.runtime.async_kit import fake
from tests.runtime.served import TOK

if __name__ == "__main__":
    pace, timeout, *words = sys.argv[1:]
    given = read(["toy", "--port", "0", "--shutdown-timeout", timeout, *words])
    options = options_of(given.args, os.environ, None)
    tls = context_of(options.tls)
    with tracer_of(options) as tracer, listening(options.host, options.port, options.uds) as bound:
        try:
            with asyncio.Runner(loop_factory=ServerLoop) as runner:
                sys.exit(runner.run(serve_over(fake(float(pace), tok=TOK), options, bound, tls, tracer)))
        except KeyboardInterrupt:
            sys.exit(130)
