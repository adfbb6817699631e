"""llmc-serve: a model is opened, listens, drains and ends; arguments and the environment are read elsewhere."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from llmc_runtime.compile_cache import is_id
from llmc_runtime.defaults import described
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server.http.listen import ServerLoop, listening, name_of
from llmc_runtime.server.http.tls_reload import Renewed, context_of
from llmc_runtime.server.server_options import Options
from llmc_runtime.signals import ENDING, unwinding

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from llmc_runtime.api.async_llm import AsyncLLM
    from llmc_runtime.server.load_shedding import Shed
    from llmc_runtime.server.serving import Serving

ENGINE_FAILED = 4  # exit code
_EXTRA_SECONDS = 5  # after the shutdown timeout, for connections whose requests were told to end
_NOTICE = 0.5  # seconds in which requests are told that the engine is gone, before the server ends
_PENDING = 2048  # connections that wait to be accepted
_ANSWERS = 4  # of the greatest size may be open at a time
_ARENAS = 4  # heaps of threads
_SWITCH_SECONDS = 0.0005  # after which a thread that renders a template gives way to the event loop
_LOOK = 0.05  # seconds between two looks at what is still open


def serve(options: Options) -> int:
    """Serve until a signal ends it. The exit code: 0 after SIGTERM, ENGINE_FAILED where the engine failed too often.
    SystemExit where a signal comes before the server is there; LlmcError E646, E649, E665, those of opening."""
    require_packages()
    from llmc_runtime.api.async_llm import AsyncLLM
    from llmc_runtime.server.http.request_log import teller

    tls = context_of(options.tls)
    with unwinding(), listening(options.host, options.port, options.uds) as bound:
        say = teller(options.log_format)
        for note in options.notes:
            say(note)
        llm = AsyncLLM(options.model, say=say, **options.engine)
        llm.compile()
        with asyncio.Runner(loop_factory=ServerLoop) as runner:
            return runner.run(serve_over(llm, options, bound, tls))


def require_packages() -> None:
    """LlmcError E665 unless what the server needs is installed."""
    try:
        import uvicorn  # noqa: F401

        import llmc_runtime.server.app  # noqa: F401
    except ImportError as e:
        raise LlmcError("E665", f"the server needs a package: {e}", "pip install 'llmc-aot[serve]'") from None


async def serve_over(llm: AsyncLLM, options: Options, bound: socket.socket, tls: ssl.SSLContext | None = None) -> int:
    """Start `llm` and serve it on a bound socket until a signal has ended it and every request, or its engine has
    failed too often. The exit code: 0, ENGINE_FAILED."""
    import uvicorn

    from llmc_runtime.server.dump import dump_on_quit
    from llmc_runtime.server.http.request_log import teller, to_stderr
    from llmc_runtime.server.operations.malloc import return_freed_memory
    from llmc_runtime.server.protocol import MOST, descriptors, light_connections

    to_stderr(options.log_level, options.log_format)
    return_freed_memory(_ARENAS)
    sys.setswitchinterval(_SWITCH_SECONDS)
    say = teller(options.log_format)
    if (most := descriptors(options.max_connections)) < MOST and options.max_connections is None:
        say(f"{most} connections at a time: ulimit -n allows no more")
    async with llm:
        serving = _serving(options, llm)
        serving.offload.warm()
        gc.collect()
        gc.freeze()  # what is there stays: collections need not look at it
        config = _config(options, serving, most)
        config.ssl = tls
        choice = llm.args.generation_config, llm.args.override_generation_config
        for line in filter(None, (described(llm.generation, *choice), *serving.dialect.lines)):
            say(line)
        loop, tasks = asyncio.get_running_loop(), set[Any]()

        async def leave(server: Any) -> None:
            """What is open may end, in time; meanwhile whoever comes is told."""
            end = loop.time() + options.shutdown_timeout
            while serving.admission.open_sequences and loop.time() < end:
                await asyncio.sleep(_LOOK)
            if serving.admission.open_sequences:
                await llm.shutdown()
            server.should_exit = True

        def drain(server: Any) -> None:
            serving.admission.draining = True
            loop.call_soon_threadsafe(lambda: tasks.add(loop.create_task(leave(server))))

        dump_on_quit(loop, serving)
        ready = partial(_announce, options, serving, name_of(bound, tls is not None), say)
        server = draining(uvicorn, config, ready, drain)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as it is when the server has ended and gives everything back
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            signal.signal(signal.SIGHUP, server.handle_exit)
        if isinstance(tls, Renewed):
            tasks.add(loop.create_task(tls.follow()))
        light = light_connections(config.http_protocol_class, server.server_state, options.keep_alive)
        if isinstance(loop, ServerLoop):
            loop.light = light
        failed = loop.create_task(_end_with_engine(llm, server, say))
        try:
            await server.serve([bound])
        finally:
            failed.cancel()
            light.close()
            serving.close()
    return ENGINE_FAILED if llm.gave_up else 0


def _announce(options: Options, serving: Serving, address: str, say: Callable[[str], None]) -> None:
    """Say that the server is ready: requests are accepted, and signals end it."""
    say(f"{serving.names[0]} at {address}")
    if not options.local and not options.keys:
        say("anybody who reaches this address may send requests: no API keys were given")


async def _end_with_engine(llm: AsyncLLM, server: Any, say: Callable[[str], None]) -> None:
    """End the server when the engine is not started again. Requests that are open have been answered by then, and for
    a moment those that come are."""
    await llm.wait_given_up()
    say(f"the server ends with exit code {ENGINE_FAILED}: its engine failed {llm.failures} times within an hour")
    server.config.timeout_graceful_shutdown = _EXTRA_SECONDS
    await asyncio.sleep(_NOTICE)
    server.should_exit = True


def _config(options: Options, serving: Serving, connections: int) -> Any:
    """What uvicorn is told, loaded."""
    import uvicorn

    from llmc_runtime.server.http.request_log import Refusals
    from llmc_runtime.server.load_shedding import Shed
    from llmc_runtime.server.protocol import MOST_HEAD, bound_of, wire

    bound = bound_of(connections, lambda: serving.meters.refused("connections"))
    serving.meters.gauges["connections_open"] = ("Connections of clients", lambda: bound.open)
    shed = Shed(serving, options.root_path, Refusals(options.access_log))
    app = _application(options, serving, shed)
    config = uvicorn.Config(
        app, http=wire(bound, shed), ws="none", lifespan="off", log_config=None, access_log=False,
        h11_max_incomplete_event_size=MOST_HEAD, server_header=False, timeout_keep_alive=options.keep_alive,
        backlog=_PENDING, timeout_graceful_shutdown=options.shutdown_timeout + _EXTRA_SECONDS,
    )  # fmt: skip
    config.load()
    return config


def _application(options: Options, serving: Serving, shed: Shed) -> ASGIApp:
    from llmc_runtime.server.app import application
    from llmc_runtime.server.http.auth import LOOPBACK, Limits
    from llmc_runtime.server.http.request_log import Logged

    hosts = (*LOOPBACK, options.host, *options.hosts) if options.local or options.hosts else None
    limits = Limits(body=options.max_body)
    path, scope = options.root_path, options.key_scope
    app = application(serving, options.keys, limits, hosts, path, options.admin_keys, scope, shed)
    return Logged(app, options.log_requests, shed.refusals) if options.access_log else app


def names_of(options: Options) -> tuple[str, ...]:
    """What the model is called by clients: the folder's name, or the hub's without a revision, unless given."""
    name = options.model.partition("@")[0] if is_id(options.model) else Path(options.model).resolve().name
    return tuple(options.names) or (name.removesuffix(".llmc"),)


def _serving(options: Options, llm: AsyncLLM) -> Serving:
    from llmc_runtime.server.operations.admission import Admission
    from llmc_runtime.server.operations.metrics_exporter import Meters, about
    from llmc_runtime.server.serving import Serving

    names = names_of(options)
    meters = Meters(names[0], llm.stats, partial(about, llm, names[0]), options.metrics_alias)
    rows, length = llm.config.max_num_seqs, llm.config.max_model_len
    waiting = options.max_queued_tokens
    if waiting is None:
        waiting = options.max_queued_requests * length
    sequences = options.max_queued_requests + rows
    admission = Admission(
        sequences, waiting + rows * length, options.max_per_key, meters.refused, rows, len(options.keys),
        math.inf if options.max_queue_wait is None else options.max_queue_wait, lambda: llm.num_waiting,
        answers=_ANSWERS * options.max_answer,
    )  # fmt: skip
    meters.gauges["estimated_queue_wait_seconds"] = ("Seconds until a new request is expected to run", admission.wait)
    parsers = options.tool_call_parser, options.reasoning_parser
    timeout, most = options.request_timeout, options.max_answer
    return Serving(llm, names, admission, meters, options.chat_template, *parsers, timeout, most)


def draining(uvicorn: Any, config: Any, there: Callable[[], None], drain: Callable[[Any], None]) -> Any:
    """A server that says when it is there, and whose first signal begins the drain, which ends it; SIGTERM and SIGHUP
    do so with 0, another signal at once."""

    class Draining(uvicorn.Server):
        _drains = False

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            there()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            super().handle_exit(sig, frame)
            if sig in ENDING and self._captured_signals:
                self._captured_signals.remove(sig)
            if self._drains:
                self.force_exit = True
            else:
                self._drains, self.should_exit = True, False
                drain(self)

    return Draining(config)
