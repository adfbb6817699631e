"""A server over the simulated device with its engine in a process, for tests with real clients, without a model."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import textkit
import uvicorn
from llmc_runtime import LLM, AsyncLLM
from llmc_runtime.server.app import application
from llmc_runtime.server.http.auth import Limits
from llmc_runtime.server.http.connection_limit import ConnectionLimit
from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.load_shedding import LoadShedder
from llmc_runtime.server.operations.admission import Admission
from llmc_runtime.server.operations.metrics_exporter import ServerMetrics, engine_info
from llmc_runtime.server.protocol import MAX_HEAD_BYTES, HttpConnection
from llmc_runtime.server.run_server import light_connections
from llmc_runtime.server.serving import Serving
from llmc_runtime.text.tokenizer import Tokenizer

from tests.runtime.async_kit import fake, settled
from tests.runtime.fake_core import ROWS, build

TOK = Tokenizer(textkit.byte_level(bos=True), {"bos_token": "<s>", "eos_token": "</s>"}, {"default": textkit.TEMPLATE})


def in_process(tok: Tokenizer | None = TOK) -> LLM:
    """Return the same model in this process."""
    return LLM.over(build(0.0, depth=1), tok)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Return once the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


class Quick(HttpConnection):
    """A connection with short timeouts."""

    head_seconds, write_seconds = 0.5, 1.0


@dataclass
class Served:
    """A running server and its event loop."""

    url: str
    serving: Serving
    llm: AsyncLLM
    loop: asyncio.AbstractEventLoop
    shed: LoadShedder

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def rest(self) -> dict[str, Any]:
        """Return the engine's statistics once all work is done."""
        stats: dict[str, Any] = self.run(settled(self.llm))
        assert not self.serving.admission.open_sequences and not self.serving.admission.open_tokens
        return stats


@contextmanager
def served(
    *, pace: float = 0.0, keys: Sequence[str] = (), limits: Limits | None = None, sequences: int = 64,
    tokens: int = 1 << 20, per_key: int | None = None, admin_keys: Sequence[str] = (), max_wait: float = math.inf,
    timeout: float | None = None, connections: int = 1000, alias: str | None = None,
    key_scope: str = "all", origins: Sequence[str] = (), store: int = 0,
    names: Mapping[str, str] | None = None, own_loop: bool = False, keep_alive: int = 5, **options: Any,
) -> Iterator[Served]:  # fmt: skip
    """Run a server in a thread, on a free port; `options` are the engine's.

    With `own_loop` it has the event loop and the light connections of llmc-serve.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    there, found, stop = threading.Event(), list[Served](), list[uvicorn.Server]()

    async def main() -> None:
        async with fake(pace, tok=TOK, **options) as llm:
            engines = len(llm.engines)
            stats = llm.stats if engines == 1 else llm.stats_by_engine
            metrics = ServerMetrics("toy", stats, lambda: engine_info(llm, "toy"), alias, names or {})
            admission = Admission(
                sequences, tokens, per_key, metrics.refused, ROWS * engines, len(keys), max_wait,
                lambda: llm.num_waiting,
            )  # fmt: skip
            serving = Serving(llm, ("toy", "other"), admission, metrics, timeout=timeout, store_bytes=store)
            limit = ConnectionLimit(connections, lambda: metrics.refused("connections"))
            shed = LoadShedder(serving)
            hosts = ("localhost", "127.0.0.1", "[::1]")
            app = application(
                serving,
                keys,
                limits,
                hosts,
                admin_keys=admin_keys,
                key_scope=key_scope,
                shed=shed,
                origins=origins,
                connections=connections,
            )
            shed.attach(limit.head_turns)
            protocol: Any = type("Bounded", (Quick,), {"limit": limit, "shed": shed})
            config = uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=keep_alive,
            )
            stop.append(uvicorn.Server(config))
            url, loop = f"http://127.0.0.1:{listening.getsockname()[1]}", asyncio.get_running_loop()
            if isinstance(loop, ServerLoop):
                loop.light = light_connections(loop, protocol, stop[0].server_state, keep_alive)
            found.append(Served(url, serving, llm, loop, shed))
            there.set()
            await stop[0].serve([listening])
            serving.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=ServerLoop if own_loop else None) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert there.wait(60)
    try:
        yield found[0]
    finally:
        until = time.monotonic() + 20
        while not stop[0].started and time.monotonic() < until:
            time.sleep(0.01)
        stop[0].should_exit = True
        thread.join(20)
