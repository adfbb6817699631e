"""Runs llmc-serve: binds the address, starts the engine, serves until a signal, drains and ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.server import ServerState

from llmc_runtime.api.async_llm import AsyncLLM
from llmc_runtime.compile_cache import is_id
from llmc_runtime.defaults import described
from llmc_runtime.server.admin import dump_on_quit
from llmc_runtime.server.app import application
from llmc_runtime.server.http.auth import LOOPBACK, Limits, key_id
from llmc_runtime.server.http.connection_limit import (
    MAX_CONNECTIONS,
    ConnectionLimit,
    allocate_descriptors,
    set_descriptor_limit,
)
from llmc_runtime.server.http.errors import closing_response, head_timeout, too_many_connections
from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.http.light_connections import LightConnections, Refuse
from llmc_runtime.server.http.listen import listening, name_of
from llmc_runtime.server.http.request_log import (
    RefusalLog,
    RequestLog,
    configure_logging,
    startup_printer,
    written_log,
)
from llmc_runtime.server.http.tls import ReloadingContext, context_of
from llmc_runtime.server.load_shedding import LoadShedder
from llmc_runtime.server.openapi import prepare_checks
from llmc_runtime.server.operations.admission import Admission
from llmc_runtime.server.operations.malloc import return_freed_memory
from llmc_runtime.server.operations.metrics_exporter import ServerMetrics, engine_info
from llmc_runtime.server.protocol import MAX_HEAD_BYTES, HttpConnection
from llmc_runtime.server.server_options import Options
from llmc_runtime.server.serving import Serving
from llmc_runtime.signals import ENDING, unwinding

if TYPE_CHECKING:
    from llmc_runtime.server.http.tracing import RequestTracer

ENGINE_FAILED = 4  # exit code
_EXTRA_SECONDS = 5  # time after the shutdown timeout for connections whose requests were aborted
_NOTICE_SECONDS = 0.5  # time in which requests still get an error before a server without an engine ends
_ACCEPT_QUEUE = 4096  # connections; beyond net.core.somaxconn, clients try again after a second
_MAX_LARGE_RESPONSES = 4  # responses of the maximum size that may be open at a time
_MALLOC_ARENAS = 4
_SWITCH_SECONDS = 0.0005  # interval at which a thread that renders a template yields to the event loop
# A full collection takes 140 ms if 4,000 connections are open, so it has to be rare; one of the middle generation takes
# 5 ms for each 7,000 new objects.
_GC_THRESHOLDS = 700, 3, 333
_POLL_SECONDS = 0.05  # interval between checks of the open requests while draining
READY, STOPPING = "READY=1", "STOPPING=1"  # states for the service manager
log = logging.getLogger("llmc.serve")


class DrainingServer(uvicorn.Server):
    """A server that calls `on_started` once it accepts connections, and `drain` on the first signal.

    A second signal ends it at once. After SIGTERM and SIGHUP the process does not end by the signal itself.
    """

    def __init__(
        self, config: uvicorn.Config, on_started: Callable[[], None], drain: Callable[[DrainingServer], None]
    ) -> None:
        super().__init__(config)
        self._on_started, self._drain, self._draining = on_started, drain, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        super().handle_exit(sig, frame)
        if sig in ENDING and self._captured_signals:
            self._captured_signals.remove(sig)
        if self._draining:
            self.force_exit = True
        else:
            self._draining, self.should_exit = True, False
            self._drain(self)


def serve(options: Options) -> int:
    """Serve until a signal, and return the exit code: 0 after SIGTERM, or ENGINE_FAILED.

    Raises SystemExit for a signal during startup, and LlmcError E646, E649 and those of opening the model.
    """
    tls = context_of(options.tls)
    with unwinding(), tracer_of(options) as tracer, listening(options.host, options.port, options.uds) as bound:
        say = startup_printer(options.log_format)
        for note in options.notes:
            say(note)
        llm = AsyncLLM(options.model, say=say, **options.engine)
        llm.compile()
        with asyncio.Runner(loop_factory=ServerLoop) as runner, written_log():
            return runner.run(serve_over(llm, options, bound, tls, tracer))


@contextmanager
def tracer_of(options: Options) -> Iterator[RequestTracer | None]:
    """Yield the exporter of traces, if there is one; at the end, export what remains.

    Raises ModuleNotFoundError without the extra `tracing`.
    """
    if options.otlp_traces_endpoint is None:
        yield None
        return
    from llmc_runtime.server.http.tracing import RequestTracer

    with closing(RequestTracer(options.otlp_traces_endpoint, names_of(options)[0])) as tracer:
        yield tracer


async def serve_over(
    llm: AsyncLLM,
    options: Options,
    bound: socket.socket,
    tls: ssl.SSLContext | None = None,
    tracer: RequestTracer | None = None,
) -> int:
    """Start `llm` and serve it on a bound socket until a signal, or until its engine has failed too often.

    Returns the exit code: 0 or ENGINE_FAILED.
    """
    configure_logging(options.log_level, options.log_format)
    return_freed_memory(_MALLOC_ARENAS)
    sys.setswitchinterval(_SWITCH_SECONDS)
    say = startup_printer(options.log_format)
    connections = set_descriptor_limit(options.max_connections)
    allocate_descriptors(connections)
    if connections < MAX_CONNECTIONS and options.max_connections is None:
        say(f"at most {connections} connections: ulimit -n allows no more")
    prepared = asyncio.get_running_loop().run_in_executor(None, prepare_checks)  # while the engine opens
    async with llm:
        await prepared
        serving = _serving(options, llm)
        serving.text_processes.warm()
        gc.collect()
        gc.freeze()  # objects that exist now are never collected
        gc.set_threshold(*_GC_THRESHOLDS)
        config = _config(options, serving, connections, tracer)
        config.ssl = tls
        defaults = described(llm.generation, llm.args.generation_config, llm.args.override_generation_config)
        for line in filter(None, (defaults, *serving.formats.lines)):
            say(line)
        await _run(config, options, serving, bound, say)
    return ENGINE_FAILED if llm.gave_up else 0


async def _run(
    config: uvicorn.Config, options: Options, serving: Serving, bound: socket.socket, say: Callable[[str], None]
) -> None:
    """Accept connections on the bound socket until the server ends: after a signal, or with its engine."""
    llm, tls, loop = serving.llm, config.ssl, asyncio.get_running_loop()
    tasks = set[Any]()  # keeps references to what runs in the background

    def drain(server: DrainingServer) -> None:
        serving.admission.draining = True
        notify(options.notify_socket, STOPPING)
        work = partial(_drain, llm, serving, server, options.shutdown_timeout)
        loop.call_soon_threadsafe(lambda: tasks.add(loop.create_task(work())))

    ready = partial(_announce, options, serving, name_of(bound, tls is not None), say)
    server = DrainingServer(config, ready, drain)
    _handle_signals(server, serving)
    if isinstance(tls, ReloadingContext):
        tasks.add(loop.create_task(tls.follow()))
    protocol: Any = config.http_protocol_class
    if isinstance(loop, ServerLoop):
        loop.light = light_connections(loop, protocol, server.server_state, options.keep_alive)
        loop.handshakes_allowed = protocol.limit.handshakes
        llm.output_pause = loop.fair.batches.remaining
    failed = loop.create_task(_end_with_engine(llm, server, say))
    try:
        await server.serve([bound])
    finally:
        failed.cancel()
        if isinstance(loop, ServerLoop) and loop.light is not None:
            loop.light.close()
        serving.close()


def _handle_signals(server: DrainingServer, serving: Serving) -> None:
    """Install the handlers of SIGQUIT (diagnostics) and SIGHUP (drain); uvicorn installs the others."""
    dump_on_quit(asyncio.get_running_loop(), serving)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # in effect once the server has ended and cleans up
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
        signal.signal(signal.SIGHUP, server.handle_exit)


def _announce(options: Options, serving: Serving, address: str, say: Callable[[str], None]) -> None:
    """Print that the server accepts requests, and tell the service manager."""
    notify(options.notify_socket, READY)
    say(f"{serving.names[0]} at {address}")
    if not options.local and not options.keys:
        say("anyone who can reach this address may use the model: no API keys are set")


async def _drain(llm: AsyncLLM, serving: Serving, server: DrainingServer, seconds: float) -> None:
    """Let open requests end within `seconds`, abort the others, and end the server. New requests are refused."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while serving.admission.open_sequences and loop.time() < end:
        await asyncio.sleep(_POLL_SECONDS)
    if serving.admission.open_sequences:
        await llm.shutdown()
    server.should_exit = True


async def _end_with_engine(llm: AsyncLLM, server: DrainingServer, say: Callable[[str], None]) -> None:
    """End the server once the engine is not restarted any more.

    Open requests have received an error by then; for _NOTICE_SECONDS new requests receive one as well.
    """
    await llm.wait_given_up()
    say(f"the server ends with exit code {ENGINE_FAILED}: its engine failed {llm.failures} times within an hour")
    server.config.timeout_graceful_shutdown = _EXTRA_SECONDS
    await asyncio.sleep(_NOTICE_SECONDS)
    server.should_exit = True


def _config(options: Options, serving: Serving, connections: int, tracer: RequestTracer | None) -> uvicorn.Config:
    """Return uvicorn's configuration, loaded."""
    limit = ConnectionLimit.within_descriptors(connections, lambda: serving.metrics.refused("connections"))
    serving.metrics.gauges["connections_open"] = ("Open client connections", lambda: limit.open)
    shed = LoadShedder(serving, options.root_path, RefusalLog(options.access_log))
    hosts = (*LOOPBACK, options.host, *options.hosts) if options.local or options.hosts else None
    app = application(
        serving,
        keys=options.keys,
        limits=Limits(body=options.max_body),
        hosts=hosts,
        root_path=options.root_path,
        admin_keys=options.admin_keys,
        key_scope=options.key_scope,
        shed=shed,
        origins=options.origins,
        connections=connections,
    )
    shed.attach(limit.head_turns)
    if options.access_log or tracer:
        names = _key_names(options)
        app = RequestLog(app, options.log_requests, shed.refusals, names, options.access_log, tracer)
    config = uvicorn.Config(
        app,
        http=type("Connection", (HttpConnection,), {"limit": limit, "shed": shed}), ws="none", lifespan="off",
        log_config=None, access_log=False, h11_max_incomplete_event_size=MAX_HEAD_BYTES, server_header=False,
        timeout_keep_alive=options.keep_alive, backlog=_ACCEPT_QUEUE,
        timeout_graceful_shutdown=options.shutdown_timeout + _EXTRA_SECONDS,
    )  # fmt: skip
    config.load()
    return config


def names_of(options: Options) -> tuple[str, ...]:
    """Return the served names of the model; by default the folder's name, or the hub id without its revision."""
    name = options.model.partition("@")[0] if is_id(options.model) else Path(os.path.realpath(options.model)).name
    return tuple(options.names) or (name.removesuffix(".llmc"),)


def _key_names(options: Options) -> dict[str, str]:
    return dict(zip(map(key_id, options.keys), options.key_names))


def _serving(options: Options, llm: AsyncLLM) -> Serving:
    names = names_of(options)
    engines = llm.args.data_parallel_size
    stats: Any = llm.stats if engines == 1 else llm.stats_by_engine
    metrics = ServerMetrics(
        names[0], stats, partial(engine_info, llm, names[0]), options.metrics_alias, _key_names(options)
    )
    rows, length = llm.config.max_num_seqs * engines, llm.config.max_model_len
    queued_tokens = options.max_queued_tokens
    if queued_tokens is None:
        queued_tokens = options.max_queued_requests * length
    admission = Admission(
        sequences=options.max_queued_requests + rows,
        tokens=queued_tokens + rows * length,
        per_key=options.max_per_key,
        refused=metrics.refused,
        rows=rows,
        keys=len(options.keys),
        max_wait=math.inf if options.max_queue_wait is None else options.max_queue_wait,
        backlog=lambda: llm.num_waiting,
        answers=_MAX_LARGE_RESPONSES * options.max_answer,
    )
    metrics.gauges["estimated_queue_wait_seconds"] = ("Estimated queueing time of a new request", admission.wait)
    return Serving(
        llm,
        names,
        admission,
        metrics,
        template=options.chat_template,
        calls=options.tool_call_parser,
        reasoning=options.reasoning_parser,
        timeout=options.request_timeout,
        max_answer=options.max_answer,
        store_bytes=options.response_store or 0,
        variables=options.default_chat_template_kwargs or {},
    )


def light_connections(
    loop: ServerLoop, protocol: type[HttpConnection], state: ServerState, keep_alive: float
) -> LightConnections:
    """Return the light connections of a server whose others are instances of `protocol` and share `state`."""
    limit, shed, fair = protocol.limit, protocol.shed, loop.fair
    assert shed is not None
    shed.overloaded = lambda: fair.batching

    def on_change(change: int) -> None:
        limit.open += change

    def full_response() -> bytes:
        limit.on_refused()
        return closing_response(too_many_connections())

    def refusals() -> Refuse | None:
        return shed.turn(state.default_headers) if shed.active else None

    light = LightConnections(
        fair,
        capacity=lambda: max(0, limit.maximum - limit.open),
        refusals=refusals,
        on_change=on_change,
        timeout_response=head_timeout(protocol.head_seconds),
        head_seconds=protocol.head_seconds,
        keep_alive=keep_alive,
        turns=limit.head_turns,
        full_response=full_response,
        probe=lambda head: shed.probe(head, state.default_headers),
    )
    limit.evict_light = light.evict
    return light


def notify(address: str, state: str) -> None:
    """Tell the service manager a state of the server, by the protocol of sd_notify(3).

    `address` is a datagram socket: a path, or @ and a name in the abstract namespace; "" for none. An address that
    cannot be reached is logged: the server works without it.
    """
    if not address:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as link:
            link.connect("\0" + address[1:] if address.startswith("@") else address)
            link.sendall(state.encode())
    except OSError as e:
        log.warning("the state %s was not reported to the service manager: %s", state, e.strerror)
