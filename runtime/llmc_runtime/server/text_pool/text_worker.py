"""The entry point of a text process, with the arguments LINK and SPEC: the descriptors of the server's socket and of a
file with the TextProcessConfig. The process runs one job after the other, and exits when the server closes the socket.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import traceback
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.server import api_routes as api
from llmc_runtime.server.http.errors import ApiError, internal, to_api_error
from llmc_runtime.server.operations import malloc
from llmc_runtime.server.text_pool import jobs
from llmc_runtime.server.text_pool import text_messages as m

_encode = msgspec.msgpack.encode


class Link:
    """Exchanges frames with the server. Raises EOFError or OSError if the server has exited."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    def receive(self) -> tuple[bytes, bytearray]:
        """Receive a frame, and return its kind and payload."""
        kind, size = m.HEAD.unpack(self._exactly(m.HEAD.size))
        return kind, self._exactly(size)

    def send(self, kind: bytes, payload: Any = b"") -> None:
        """Send a frame."""
        self._link.sendall(m.HEAD.pack(kind, len(payload)))
        self._link.sendall(payload)

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            count = self._link.recv_into(rest)
            if not count:
                raise EOFError
            rest = rest[count:]
        return data


class Worker:
    """Runs jobs within their limits on CPU time and memory."""

    def __init__(self, link: Link, texts: jobs.TextJobs) -> None:
        self._link, self._texts = link, texts
        self._answers: Mapping[bytes, Callable[[bytearray], bytes]] = {
            route.job: partial(texts.answer, route) for route in jobs.ANSWERS
        }
        self._jobs: Mapping[bytes, Callable[[bytearray], jobs.Job]] = {
            api.COMPLETIONS.job: texts.completion, api.CHATS.job: texts.chat, api.RESPONSES.job: texts.response,
            api.MESSAGES.job: texts.message, api.INPUT_TOKENS.job: texts.input_tokens,
            **{route.job: partial(texts.pooled, route.request) for route in api.POOLED_ROUTES},
        }  # fmt: skip
        self._max_resident = malloc.resident_bytes() + m.KEPT_BYTES

    def run(self) -> None:
        """Run jobs until the server closes the link or the memory has grown too much."""
        leaves = False
        while not leaves:
            kind, body = self._link.receive()
            if kind == m.READY:
                self._link.send(m.READY)
                continue
            signal.setitimer(signal.ITIMER_PROF, m.CPU_SECONDS)
            ended = self._result_of(kind, body)
            del body
            signal.setitimer(signal.ITIMER_PROF, 0)
            gc.collect()
            malloc.trim()
            leaves = ended.leaves = malloc.resident_bytes() > self._max_resident
            ended.unknown = self._texts.unknown
            self._link.send(m.DONE if isinstance(ended, m.Done) else m.FAILED, _encode(ended))

    def _result_of(self, kind: bytes, body: bytearray) -> m.Done | m.Failure:
        try:
            return self._job(kind, body)
        except ApiError as e:
            return m.Failure.of(e)
        except LlmcError as e:
            return m.Failure.of(to_api_error(e, "prompt"))
        except (EOFError, OSError, MemoryError):
            raise
        except Exception as e:  # only the place of the error is logged: its message may quote the request
            where = traceback.extract_tb(e.__traceback__)[-1]
            print(f"a text process failed: {type(e).__name__} at {where.name}:{where.lineno}", file=sys.stderr)
            return m.Failure.of(internal())

    def _job(self, kind: bytes, body: bytearray) -> m.Done:
        if kind in self._answers:
            self._link.send(m.ANSWER, self._answers[kind](body))
            return m.Done()
        job = self._jobs[kind](body)
        self._link.send(m.PARSED, _encode(job.parsed))
        order, payload = self._link.receive()
        if order == m.DROP:
            return m.Done()
        characters = int.from_bytes(payload[:4], "little", signed=True)
        for prompt in job.prompts(payload[4:]):
            self._link.send(m.IDS, memoryview(array("I", prompt.ids)).cast("B"))
            text = prompt.text if prompt.text is None or characters < 0 else prompt.text[:characters]
            self._link.send(m.TEXT, b"" if text is None or not characters else b"+" + text.encode())
        return job.done


def limit_address_space(size: int) -> None:
    """Limit further allocations of this process to `size` bytes."""
    now = malloc.address_bytes()
    if now:
        resource.setrlimit(resource.RLIMIT_AS, (now + size, now + size))


def main(argv: Sequence[str]) -> int:
    """Run the process. Returns the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    malloc.return_freed_memory(1)
    link = Link(socket.socket(fileno=int(argv[0])))
    spec_file = int(argv[1])  # shared with other processes, including the file position
    spec = msgspec.msgpack.decode(os.pread(spec_file, os.fstat(spec_file).st_size, 0), type=m.TextProcessConfig)
    try:
        worker = Worker(link, jobs.TextJobs(spec))
        del spec
        gc.collect()
        gc.freeze()
        gc.disable()  # a parsed body has no cycles; the rest is collected after each job
        limit_address_space(m.MEMORY_BYTES)
        link.send(m.READY)
        worker.run()
    except (EOFError, OSError):  # the server has exited
        return 0
    except MemoryError:
        return m.OUT_OF_MEMORY
    return 0
