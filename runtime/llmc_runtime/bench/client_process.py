"""A client process of the load generator: sends its share of every mix on schedule and records each request.

Its standard input has a line with the Plan and, once the process has written {"ready": true}, a line with the start
time (monotonic clock). Its standard output has lines with the progress and finally one with {"done": ClientResult}.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import resource
import ssl
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from llmc_runtime.bench.http_client import Connection, Pool, Reply, WireError
from llmc_runtime.bench.messages import ClientResult, Plan, encode
from llmc_runtime.bench.record import CUT, FAILED, OK, Record, Stream
from llmc_runtime.bench.workload import Mix

_PREPARED_BODIES = 256  # request bodies per mix that are prepared before the start
_TICK_SECONDS = 0.02  # seconds between measurements of the event loop's delay
_CANCEL_SECONDS = 0.005  # seconds between the end of a mix and the cancellation of its streams
_REPORT_SECONDS = 0.5  # seconds between progress lines


class Load:
    """The share of one process in a plan."""

    def __init__(self, plan: Plan, process: int, processes: int) -> None:
        self._process, self._processes = process, processes
        self._mixes, self._recipe = plan.mixes, plan.recipe
        self._head, self._timeout = plan.head.encode("latin-1"), plan.timeout
        self._pool = Pool(plan.host, plan.port, ssl.create_default_context() if plan.tls else None)
        self._bodies = [self._bodies_of(mix) for mix in self._mixes]
        self.records: list[Record] = []
        self._open: set[int] = set()  # indices into records
        self._counts = {name: Counter[int]() for name in (OK, FAILED, CUT, "tokens")}
        self.late = array("d")  # the event loop's delays in seconds

    def _bodies_of(self, mix: Mix) -> Iterator[tuple[bytes, int]]:
        """Return the request bodies of a mix. The first ones are created now, so that the start is not delayed."""
        source = self._recipe.bodies(mix, self._process, self._processes)
        return chain(list(islice(source, min(_PREPARED_BODIES, mix.num_prompts or _PREPARED_BODIES))), source)

    async def warm_up(self, count: int) -> None:
        """Send requests that are not counted, in turn. Raises WireError, OSError or ValueError if one fails."""
        source = self._recipe.bodies(self._mixes[0], 0, 1)
        for _ in range(count):
            record = await self._send(Record(0, 0.0), *next(source))
            if record.status != OK:
                raise WireError(f"a warm-up request failed: {record.error}")

    async def run(self, start: float) -> ClientResult:
        """Run the load from `start` on."""
        watch = asyncio.create_task(self._watch())
        await asyncio.sleep(max(start - time.monotonic(), 0))
        cpu, started = time.process_time(), time.monotonic()
        await asyncio.gather(*(self._drive(i, start) for i in range(len(self._mixes))))
        busy = (time.process_time() - cpu) / max(time.monotonic() - started, 1e-9)
        watch.cancel()
        self._pool.close()
        return ClientResult(self.records, busy, self.late)

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            self.late.append(time.monotonic() - before - _TICK_SECONDS)

    async def _drive(self, number: int, start: float) -> None:
        """Start the requests of one mix on schedule, and wait until they have ended."""
        mix = self._mixes[number]
        participants, until = mix.participants(self._processes), start + (mix.duration or math.inf)
        share = mix.share(self._process, self._processes)
        gate = asyncio.Semaphore(share or sys.maxsize)
        running: set[asyncio.Task[None]] = set()
        loop, cut = asyncio.get_running_loop(), None
        if mix.closed and mix.duration is not None:
            cut = loop.call_later(until + _CANCEL_SECONDS - time.monotonic(), _cancel, running)
        for i, at in enumerate(mix.arrivals(str(self._recipe.seed))):
            if self._process >= participants:
                break
            if i % participants != self._process:
                continue
            if (wait := start + at - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            await gate.acquire()
            if time.monotonic() >= until:
                break
            task = asyncio.create_task(self._run_request(number, start + at, gate))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            await asyncio.wait(running)
        if cut is not None:
            cut.cancel()

    async def _run_request(self, number: int, due: float, gate: asyncio.Semaphore) -> None:
        record, index = Record(number, due), len(self.records)
        self.records.append(record)
        self._open.add(index)
        try:
            await self._send(record, *next(self._bodies[number]))
        except asyncio.CancelledError:
            record.status = CUT
        except (OSError, WireError, ValueError) as e:
            record.error = f"{type(e).__name__}: {e}"[:300]
        finally:
            record.end = time.monotonic()
            if not record.counted:
                record.output_tokens = record.chunks
            self._open.discard(index)
            self._counts[record.status][number] += 1
            self._counts["tokens"][number] += record.output_tokens
            gate.release()

    async def _send(self, record: Record, body: bytes, prompt_tokens: int) -> Record:
        """Send a request and record its response. A connection that the server closed while idle is replaced once."""
        request = self._head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        record.prompt_tokens = prompt_tokens
        stream, error_body = Stream(record, time.monotonic), bytearray()

        def on_data(reply: Reply, part: bytes) -> None:
            if reply.status == 200:
                stream.feed(part)
            elif len(error_body) < 1 << 16:
                error_body.extend(part)

        record.sent = time.monotonic()
        connection = await self._pool.acquire()
        try:
            reply = await self._answer(connection, request, on_data)
        except WireError:
            if not connection.used or record.chunks:
                raise
            connection = await self._pool.acquire(fresh=True)
            reply = await self._answer(connection, request, on_data)
        self._pool.release(connection, reply)
        if stream.complete and reply.status == 200:
            record.status = OK
        else:
            record.error = stream.error or _refusal(reply.status, bytes(error_body))
        return record

    async def _answer(self, connection: Connection, request: bytes, on_data: Any) -> Reply:
        try:
            async with asyncio.timeout(self._timeout):
                return await connection.send(request, on_data)
        except BaseException as e:
            connection.transport.abort()
            if isinstance(e, TimeoutError):
                raise TimeoutError(f"no complete response within {self._timeout:g} s") from None
            raise

    def progress(self) -> dict[str, Any]:
        """Return the counts so far, each by mix."""
        numbers = range(len(self._mixes))
        counts = {name: list(map(count.__getitem__, numbers)) for name, count in self._counts.items()}
        counts["open"] = [0] * len(numbers)
        for record in (self.records[index] for index in self._open):
            counts["open"][record.mix] += 1
            counts["tokens"][record.mix] += record.chunks
        return counts


def _cancel(running: set[asyncio.Task[None]]) -> None:
    for task in list(running):
        task.cancel()


def _refusal(status: int, body: bytes) -> str:
    if status == 200:
        return "the stream ended early"
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"HTTP {status}: {message}"[:300]


def _send_message(message: Mapping[str, Any]) -> None:
    """Write one line of JSON to the parent process."""
    sys.stdout.write(encode(message))
    sys.stdout.flush()


async def _serve(plan: Plan, process: int, processes: int) -> None:
    """Send this process's part of the requests of a plan, from the time on that the parent sends."""
    load = Load(plan, process, processes)
    try:
        if process == 0:
            await load.warm_up(plan.num_warmups)
    except (OSError, WireError, ValueError) as e:
        _send_message({"failed": str(e) or type(e).__name__})
        return
    _send_message({"ready": True})
    line = await asyncio.to_thread(sys.stdin.readline)
    if not line:
        return

    async def report() -> None:
        while True:
            await asyncio.sleep(_REPORT_SECONDS)
            _send_message({"progress": load.progress()})

    reporting = asyncio.create_task(report())
    result = await load.run(float(line))
    reporting.cancel()
    _send_message({"done": result})


def main(argv: Sequence[str]) -> int:
    """Run a client process; `argv` has its number and the number of processes. Returns the exit status."""
    process, processes = map(int, argv)
    plan = Plan.from_json(json.loads(sys.stdin.readline()))
    gc.disable()  # its pauses would be attributed to the server
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # a connection needs a descriptor
    asyncio.run(_serve(plan, process, processes))
    return 0
