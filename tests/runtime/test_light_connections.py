"""Light connections: refused requests cost no transport, the first that is served finds its data, nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

pytest.importorskip("uvicorn")
from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.http.light_connections import LightConnections
from llmc_runtime.server.http.light_requests import LightConnection, LightState, ReturningClients, answer_waiting
from llmc_runtime.server.http.read_turns import HeadTurns
from llmc_runtime.server.load_shedding import Answer

REFUSED, LATE, FULL = b"HTTP/1.1 503 X\r\ncontent-length: 2\r\n\r\nno", b"late", b"full"
AGAIN = b"again no\r\n\r\n"
PROBED = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Echo(asyncio.Protocol):
    """An ordinary connection: answers with what it receives, in brackets. `first` has `passed` of each connection."""

    passed = False
    first: ClassVar[list[bool]] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.first.append(self.passed)

    def data_received(self, data: bytes) -> None:
        self.transport.write(b"[" + data + b"]")


@dataclass
class Server:
    """A listening server whose refusals are switched by `busy`; `open` counts light ones, `opened` all so far."""

    port: int = 0
    busy: bool = True
    open: int = 0
    opened: int = 0
    refused: list[bytes] = field(default_factory=list)
    turns: Held = field(default_factory=lambda: Held())
    light: LightConnections | None = None
    returning: ReturningClients = field(default_factory=ReturningClients)

    def __call__(self, head: bytes, last: bool) -> Answer | None:
        """See refusals.Refuse."""
        return self.refusal(head, last)

    def refusal(self, head: bytes, last: bool) -> Answer | None:
        """Heads with "no" are refused; "close" among them closes, and "+N" is the length of their body."""
        if not self.busy or b"no" not in head:
            return None
        self.refused.append(head)
        length = int(head.partition(b"+")[2].split()[0]) if b"+" in head else 0
        return Answer(REFUSED, length, b"close" in head or last)

    def repeated(self, data: bytes) -> bytes | None:
        """Requests that are "again no" and nothing else are like an earlier one."""
        return REFUSED if self.busy and data == AGAIN else None

    def probe(self, head: bytes) -> Answer | None:
        """Heads with "probe" are health probes."""
        return Answer(PROBED, 0, b"close" in head, is_probe=True) if b"probe" in head else None

    def serve(self, one: LightConnection) -> tuple[LightState, bytes]:
        """Take the requests that a connection has sent."""
        return answer_waiting(one, self if self.busy else None, self.probe, 20.0, self.returning)

    def count(self, change: int) -> None:
        self.open += change
        self.opened += max(0, change)


@asynccontextmanager
async def serving(head_seconds: float = 20.0, keep_alive: float = 20.0) -> AsyncIterator[Server]:
    state, loop = Server(), asyncio.get_running_loop()
    assert isinstance(loop, ServerLoop)
    light = LightConnections(
        loop.fair, lambda: 100 * state.busy, lambda: state, state.count, LATE, head_seconds, keep_alive,
        state.turns, lambda: FULL, state.probe,
    )  # fmt: skip
    loop.light = state.light = light
    server = await loop.create_server(Echo, sock=socket.create_server(("127.0.0.1", 0)))
    state.port = server.sockets[0].getsockname()[1]
    yield state
    light.close()
    assert state.open == 0
    server.close()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=ServerLoop) as runner:
        runner.run(asyncio.wait_for(work(), 30))


async def read(stream: asyncio.StreamReader, size: int) -> bytes:
    return await asyncio.wait_for(stream.readexactly(size), 10)


def test_refusals_on_one_connection_then_a_request_that_is_served() -> None:
    async def main() -> None:
        async with serving() as state:
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            writer.write(b"a no +5\r\n\r\nabcde" + b"b no\r\n\r\n")
            assert await read(reader, 2 * len(REFUSED)) == 2 * REFUSED and state.open == 1
            writer.write(b"c no +6\r\n\r\nab")
            assert await read(reader, len(REFUSED)) == REFUSED
            writer.write(b"cd")
            await asyncio.sleep(0.05)
            writer.write(b"efyes\r\n\r\nbody")
            assert await read(reader, 13) == b"[yes\r\n\r\nbody]" and state.open == 0
            writer.write(b"more no\r\n\r\n")  # an ordinary connection now
            assert await read(reader, 13) == b"[more no\r\n\r\n]"
            assert state.refused == [b"a no +5\r\n\r\n", b"b no\r\n\r\n", b"c no +6\r\n\r\n"]
            writer.close()

    run(main)


def test_a_head_in_pieces_and_a_server_that_is_free_again_make_ordinary_connections() -> None:
    async def main() -> None:
        async with serving() as state:
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            writer.write(b"half a no")
            assert await read(reader, 11) == b"[half a no]"
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            await asyncio.sleep(0.05)
            assert state.open == 1
            state.busy = False
            writer.write(b"no\r\n\r\n")
            assert await read(reader, 8) == b"[no\r\n\r\n]"
            writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            await asyncio.sleep(0.05)
            assert state.open == 0
            writer.close()

    run(main)


def test_a_request_that_has_arrived_is_refused_while_its_connection_is_accepted() -> None:
    async def main() -> None:
        async with serving() as state:
            clients = [socket.create_connection(("127.0.0.1", state.port), timeout=10) for _ in range(3)]
            for client in clients:  # sent before the event loop can accept
                client.sendall(b"no close +3\r\n\r\nabc")
            for client in clients:
                got = await asyncio.to_thread(lambda one: one.makefile("rb").read(), client)
                assert got == REFUSED, "and the connection is closed, not reset"
                client.close()
            assert len(state.refused) == 3 and state.opened == 0
            kept = socket.create_connection(("127.0.0.1", state.port), timeout=10)
            kept.sendall(b"yes 1\r\n\r\n")  # it is served by an ordinary connection, which receives all of it
            assert await asyncio.to_thread(kept.recv, 100) == b"[yes 1\r\n\r\n]" and state.opened == 0
            kept.close()
            gone = socket.create_connection(("127.0.0.1", state.port), timeout=10)
            gone.close()  # nothing is sent to it
            await asyncio.sleep(0.05)
            assert state.open == 0

    run(main)


@pytest.mark.parametrize(
    ("data", "passed"), [(b"yes\r\n\r\n", True), (b"half", False), (b"no close +9\r\n\r\nabc", False)]
)
def test_an_ordinary_connection_knows_whether_its_request_was_checked(data: bytes, passed: bool) -> None:
    async def main() -> None:
        async with serving() as state:
            Echo.first.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            writer.write(data)
            assert await read(reader, len(data) + 2) == b"[" + data + b"]"
            assert Echo.first == [passed]
            writer.close()

    run(main)


def test_the_capacity_limits_light_connections() -> None:
    async def main() -> None:
        async with serving() as state:
            state.busy = True
            light = asyncio.get_running_loop().light  # type: ignore[attr-defined]
            light._capacity = lambda: max(0, 2 - state.open)
            clients = [socket.create_connection(("127.0.0.1", state.port), timeout=10) for _ in range(5)]
            await asyncio.sleep(0.1)
            assert state.open == 2
            for client in clients:
                client.sendall(b"x no\r\n\r\n")
            answers = [await asyncio.to_thread(client.recv, 100) for client in clients]
            assert answers.count(REFUSED) == 2 and answers.count(b"[x no\r\n\r\n]") == 3
            for client in clients:
                client.close()
            while state.open:
                await asyncio.sleep(0.01)

    run(main)


def test_idle_connections_end() -> None:
    async def main() -> None:
        async with serving(head_seconds=0.3, keep_alive=0.3) as state:
            silent, kept = [await asyncio.open_connection("127.0.0.1", state.port) for _ in range(2)]
            kept[1].write(b"no\r\n\r\n")
            assert await asyncio.wait_for(silent[0].read(), 10) == LATE
            assert await asyncio.wait_for(kept[0].read(), 10) == REFUSED
            assert state.open == 0
            left = [await asyncio.open_connection("127.0.0.1", state.port) for _ in range(3)]
            for _, writer in left:
                writer.close()
            await asyncio.sleep(0.1)
            assert state.open == 0
            for _, writer in (silent, kept):
                writer.close()

    run(main)


def test_a_client_that_sends_without_reading_is_disconnected() -> None:
    async def main() -> None:
        async with serving() as state:
            _, writer = await asyncio.open_connection("127.0.0.1", state.port)
            writer.write(b"no\r\n\r\n" * 500_000)
            other, asking = await asyncio.open_connection("127.0.0.1", state.port)
            asking.write(b"no other\r\n\r\n")
            assert await read(other, len(REFUSED)) == REFUSED
            assert len(state.refused) < 5000
            assert writer.transport is not None
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            while state.open > 1:
                await asyncio.sleep(0.01)
            writer.transport.abort()
            asking.close()

    run(main)


class Counted:
    """A socket whose calls of `recv` are counted by the sizes of their results."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.sizes = sock, list[int]()

    def recv(self, size: int, flags: int = 0) -> bytes:
        data = self.sock.recv(size, flags)
        self.sizes.append(len(data))
        return data


def test_a_refusal_whose_body_has_arrived_reads_the_socket_once() -> None:
    state = Server()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        counted: Any = Counted(ours)
        one = LightConnection(counted, lambda data, passed: None, ours.close, 0.0)
        theirs.send(b"a no +5\r\n\r\nabcde")
        assert state.serve(one) == (LightState.LIGHT, REFUSED) and one.skip == 0
        assert counted.sizes == [16] and one.deadline == 20.0
        theirs.send(b"b no +5\r\n\r\nab")
        assert state.serve(one) == (LightState.LIGHT, REFUSED) and one.skip == 3


def test_the_rest_of_a_long_pipeline_is_left_to_an_ordinary_connection() -> None:
    state = Server()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = LightConnection(ours, lambda data, passed: None, ours.close, 0.0)
        theirs.send(b"a no\r\n\r\n" * 4)
        assert state.serve(one) == (LightState.LIGHT, 4 * REFUSED)
        theirs.send(b"a no\r\n\r\n" * 4 + b"b no\r\n\r\nc")
        assert state.serve(one) == (LightState.ORDINARY, 4 * REFUSED)
        assert one.data == b"b no\r\n\r\nc" and not one.passed and len(state.refused) == 8


def test_a_body_of_ordinary_size_is_refused_with_its_head() -> None:
    state = Server()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one = LightConnection(ours, lambda data, passed: None, ours.close, 0.0)
        theirs.send(b"no close +10000\r\nContent-Length: 10000\r\n\r\n" + bytes(10_000))
        assert state.serve(one) == (LightState.CLOSED, REFUSED)


class Held(HeadTurns):
    """No head has its turn while `held` is set."""

    held = False

    def _may_begin(self, probe: bool) -> bool:
        return not self.held and super()._may_begin(probe)


def begun(state: Server, heads: list[bytes]) -> list[socket.socket]:
    """Connections that have each sent a head."""
    clients = [socket.create_connection(("127.0.0.1", state.port), timeout=10) for _ in heads]
    for client, head in zip(clients, heads, strict=True):
        client.sendall(head + b"\r\n\r\n")
    return clients


def test_requests_wait_for_their_turn_as_sockets_and_the_longest_lane_gives_way() -> None:
    async def main() -> None:
        async with serving() as state:
            assert state.light is not None
            state.turns.held, state.turns.lane_of = True, lambda head: head[:1].decode()
            clients = begun(state, [b"a1", b"b1", b"a2"])
            while state.open < 3:
                await asyncio.sleep(0.001)
            assert state.light.evict() and state.open == 2 and state.light.evict() and state.open == 1
            state.turns.held = False
            got = [await asyncio.to_thread(client.recv, 100) for client in clients]
            assert got in ([FULL, b"[b1\r\n\r\n]", FULL], [b"[a1\r\n\r\n]", FULL, FULL]) and state.open == 0
            assert not state.light.evict()
            for client in clients:
                client.close()

    run(main)


def test_requests_that_wait_for_their_turn_end_with_the_server() -> None:
    async def main() -> None:
        async with serving() as state:
            state.turns.held = True
            clients = begun(state, [b"a", b"b"])
            while state.open < 2:
                await asyncio.sleep(0.001)
            assert state.light is not None
            state.light.close()
            assert state.open == 0
            for client in clients:
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(client.recv, 100) == b""
                client.close()

    run(main)


def test_a_chunked_body_is_read_in_small_parts() -> None:
    """Chunks of a byte take 10 us each to parse, so that little of them is handed over at a time."""
    state = Server()
    chunked = b"Transfer-Encoding: chunked\r\n", b"content-length: 9000\r\ntransfer-encoding: chunked\r\n", b""
    for fields, refuse in itertools.product(chunked, (state, None)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            one = LightConnection(ours, lambda data, passed: None, ours.close, 0.0)
            sent = b"yes\r\n" + fields + b"\r\n" + b"1\r\na\r\n" * 1500
            theirs.send(sent)
            assert answer_waiting(one, refuse, lambda head: None, 20.0, ReturningClients()) == (
                LightState.ORDINARY,
                b"",
            )
            assert one.data == sent[:2048] and one.passed is (refuse is not None)
