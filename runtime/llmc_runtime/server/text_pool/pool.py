"""The pool of text processes. Jobs are queued fairly by API key, and each runs in a separate process.

In: the body of a request that is too large for the event loop (see requests.parse.is_large). Out: its checked fields
and its prompts as token ids, or the response of /tokenize and the like. Called in the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from llmc_runtime.prompts import Prompt
from llmc_runtime.python_command import memory_file
from llmc_runtime.server.fair_slots import FairSlots
from llmc_runtime.server.http.body_budget import Body
from llmc_runtime.server.http.errors import ApiError, unavailable
from llmc_runtime.server.text_pool import text_messages as m
from llmc_runtime.server.text_pool.text_process import Ended, TextProcess

MAX_PROCESSES = 2  # maximum number of processes
_START_SECONDS = 60.0  # timeout for a process to load the tokenizer
log = logging.getLogger("llmc.serve")


class TextPool:
    """Up to MAX_PROCESSES text processes.

    `spec` returns the model's configuration. `refusal` creates the exception for a rejected job. `unknown` is called
    with the number of unknown fields in a body. `keys` is the number of API keys; if there are several, one process is
    always left to the others.
    """

    def __init__(
        self,
        spec: Callable[[], m.TextProcessConfig],
        refusal: Callable[[], Exception],
        unknown: Callable[[int], None],
        keys: int,
    ) -> None:
        self._spec, self._unknown = spec, unknown
        self._file: BinaryIO | None = None
        self.lanes = FairSlots(MAX_PROCESSES, refusal, reserved=1 if keys > 1 else 0)
        self._idle: list[TextProcess] = []
        self._busy: set[TextProcess] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()
        self._starting = 0  # processes being started
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The process ids of all running processes."""
        return [process.pid for process in (*self._idle, *self._busy)]

    def warm(self) -> None:
        """Start a process in advance of the next large body."""
        if not self._idle and not self._starting and self._count < MAX_PROCESSES and not self._closed:
            self._starting += 1
            self.run_background(self._start_idle())

    def close(self) -> None:
        """End all processes; running jobs fail."""
        self._closed = True
        for process in (*self._idle, *self._busy):
            process.close()
        self._idle.clear()
        if self._file is not None:
            self._file.close()

    async def begin(self, kind: bytes, body: Body) -> OffloadedJob:
        """Start a job with a body, which is dropped once the process has received it. The caller closes the job.

        If the caller is cancelled while waiting, it leaves the queue; a job that has started finishes in the
        background. Raises ApiError.
        """
        try:
            async with body.evictable():
                await self.lanes.acquire(body.key)
            job = OffloadedJob(self, body.key, self._unknown)
            try:
                await job.begin(kind, body)
            except BaseException:
                job.close()
                raise
            return job
        finally:
            body.drop()

    async def acquire(self) -> TextProcess:
        """Return an idle process or start one. Raises ApiError 503 if it cannot be started."""
        while True:
            self._changed.clear()
            if self._idle:
                process = self._idle.pop()
                if not process.alive:
                    self.run_background(process.end())
                    continue
                self._busy.add(process)
            elif self._count < MAX_PROCESSES:
                process = await self._start()
            else:  # another process is starting
                await self._changed.wait()
                continue
            self.warm()
            return process

    def release(self, process: TextProcess, *, reusable: bool) -> None:
        """Return a process to the pool. If it is no longer usable, it is ended and replaced."""
        self._busy.discard(process)
        self._changed.set()
        if reusable and process.alive and not self._closed:
            self._idle.append(process)
            return
        self.run_background(process.end())
        self.warm()

    @property
    def _count(self) -> int:
        return len(self._idle) + len(self._busy) + self._starting

    def run_background(self, work: Any) -> asyncio.Task[Any]:
        """Run work in the background. Its exceptions reach only callers that await the task."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    async def _start_idle(self) -> None:
        self._starting -= 1  # `_start` counts it from here on
        try:
            self.release(await self._start(), reusable=True)
        except ApiError as e:
            log.warning("%s", e.message)

    async def _start(self) -> TextProcess:
        """Start a process and wait until it is ready. Raises ApiError 503 if it does not start in time."""
        self._starting += 1
        try:
            if self._file is None:
                encoded = await asyncio.to_thread(lambda: msgspec.msgpack.encode(self._spec()))
                self._file = memory_file("llmc-texts", encoded)
            process = TextProcess(self._file)
            self._busy.add(process)
        except OSError as e:
            raise unavailable(f"the system cannot create a process for large bodies: {e.strerror}") from None
        finally:
            self._starting -= 1
            self._changed.set()
        try:
            async with asyncio.timeout(_START_SECONDS):
                kind, _ = await process.receive()
                assert kind == m.READY
        except BaseException as e:
            self._busy.discard(process)
            self._changed.set()
            self.run_background(process.end())
            if isinstance(e, Ended | TimeoutError):
                raise unavailable("the process for large bodies did not start") from None
            raise
        return process


class OffloadedJob:
    """A job of a text process, which is reserved until `close`.

    `parsed` is set once a completion or chat has begun, `response`, in parts, for the other kinds of job, and `done`
    once the prompts have been received.
    """

    def __init__(self, pool: TextPool, key: str, unknown: Callable[[int], None]) -> None:
        self._pool, self._key, self._unknown, self._closed = pool, key, unknown, False
        self._process: TextProcess | None = None
        self._work: asyncio.Task[Any] | None = None
        self._reusable = False  # the process can take another job
        self._open = False  # it waits for our next message
        self.parsed = m.Parsed(b"")
        self.response, self.done = list[bytearray](), m.Done()

    async def begin(self, kind: bytes, body: Body) -> None:
        """Send the body and wait for the reply. Raises ApiError."""
        await self._run(self._begin(kind, body))

    async def prompts(self, characters: int, earlier: bytes = b"") -> list[Prompt]:
        """Return the prompts, each with the first `characters` characters of its text (-1: all of it, 0: None).

        `earlier` is the JSON of the items of earlier responses (see responses_request.Earlier). The process is released
        afterwards. Raises ApiError.
        """
        prompts: list[Prompt] = await self._run(self._prompts(characters, earlier))
        self.close()
        return prompts

    def take_fields(self, kind: Any) -> Any:
        """Return the request without the fields of the prompt. Their JSON is dropped."""
        fields = msgspec.json.decode(self.parsed.fields, type=kind)
        self.parsed.fields = b""
        if self.parsed.allowed is not None:
            fields.allowed_token_ids = array("I", self.parsed.allowed)
        return fields

    def close(self) -> None:
        """Release the process once the current work has ended."""
        if not self._closed:
            self._closed = True
            self._pool.run_background(self._finish())

    async def _finish(self) -> None:
        if self._work is not None:
            await asyncio.wait([self._work])
        if self._open and self._process is not None:
            with contextlib.suppress(ApiError):
                await self._within(self._drop())
        if self._process is not None:
            self._pool.release(self._process, reusable=self._reusable)
        self._pool.lanes.release(self._key)

    async def _run(self, work: Any) -> Any:
        task = self._work = self._pool.run_background(self._within(work))
        try:
            return await asyncio.shield(task)
        finally:
            if task.done():
                self._work = None  # its error refers to the frames of the request, and these to this object
            del task

    async def _within(self, work: Any) -> Any:
        """Return the result of the work; the process is ended if it takes too long."""
        try:
            async with asyncio.timeout(m.SECONDS):
                return await work
        except TimeoutError:
            self._reusable = self._open = False
            raise unavailable(f"the request was not read within {m.SECONDS:g} s: the server is too busy") from None
        except Ended:
            self._reusable = self._open = False
            assert self._process is not None
            raise await self._process.end_error() from None

    async def _begin(self, kind: bytes, body: Body) -> None:
        process = self._process = await self._pool.acquire()
        while not await process.is_ready():
            self._process = None
            self._pool.release(process, reusable=False)
            process = self._process = await self._pool.acquire()
        await process.send(kind, body.data)
        body.drop()
        reply, parts = await process.receive_parts()
        if reply == m.ANSWER:
            self.response = parts
            await self._ending()
            return
        payload = bytearray().join(parts)
        if reply == m.PARSED:
            self._open = True
            self.parsed = msgspec.msgpack.decode(payload, type=m.Parsed)
        else:
            self._ended(reply, payload)

    async def _prompts(self, characters: int, earlier: bytes) -> list[Prompt]:
        assert self._process is not None
        self._open = False
        await self._process.send(m.PROMPTS, characters.to_bytes(4, "little", signed=True) + earlier)
        prompts: list[Prompt] = []
        while True:
            kind, payload = await self._process.receive()
            if kind != m.IDS:
                self._ended(kind, payload)
                return prompts
            _, text = await self._process.receive()
            prompts.append(Prompt(array("I", payload), text[1:].decode() if text else None))
            await asyncio.sleep(0)

    async def _drop(self) -> None:
        assert self._process is not None
        await self._process.send(m.DROP)
        await self._ending()

    async def _ending(self) -> None:
        assert self._process is not None
        self._open = False
        self._ended(*await self._process.receive())

    def _ended(self, kind: bytes, payload: bytearray) -> None:
        decode = msgspec.msgpack.decode
        end = decode(payload, type=m.Done) if kind == m.DONE else decode(payload, type=m.Failure)
        self._reusable = not end.leaves
        self._unknown(end.unknown)
        if isinstance(end, m.Failure):
            raise end.error()
        self.done = end
