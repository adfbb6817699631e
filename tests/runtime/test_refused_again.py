"""The short way of a refusal that is like others of its turn: which requests take it; its response is the same."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("uvicorn")
from llmc_runtime.server.http.auth import Guard, Keys, Limits
from llmc_runtime.server.load_shedding import LoadShedder
from starlette.applications import Starlette

from tests.runtime.served import served, until
from tests.runtime.test_light_connections import AGAIN, REFUSED, read, run, serving
from tests.runtime.test_server_shed import KEYS, head, occupy


def test_a_request_on_a_kept_connection_like_others_of_the_turn_takes_the_short_way() -> None:
    """The first two requests of a connection do not, nor one with something after it."""

    async def main() -> None:
        async with serving() as state:
            reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
            for data, refused in ((AGAIN, 1), (AGAIN, 2), (AGAIN, 2), (b"b no\r\n\r\n", 3), (2 * AGAIN, 5)):
                writer.write(data)
                size = data.count(b"\r\n\r\n") * len(REFUSED)
                assert await read(reader, size) == REFUSED * (size // len(REFUSED))
                assert len(state.refused) == refused and state.open == 1
            state.busy = False
            writer.write(AGAIN)
            assert await read(reader, len(AGAIN) + 2) == b"[" + AGAIN + b"]"
            writer.close()

    run(main)


def test_a_refusal_like_others_of_the_turn_is_the_same_and_is_counted() -> None:
    """Others are left to the long way: parts of requests, two at once, heads that are new or close the connection."""
    with served(pace=0.2, sequences=64, per_key=2, keys=KEYS) as server:
        links = [occupy(server) for _ in range(2)]
        until(lambda: server.serving.admission.open_sequences == 2)
        shed = LoadShedder(server.serving)
        shed.check = Guard(Starlette(), Keys(KEYS), Limits(), None).check
        refused, turn, whole = server.serving.metrics._refused, shed.turn([]), head(2, "X-Request-Id: same") + b"{}"
        assert turn.repeated(whole) is None, "nothing was refused in this turn"
        first, before = turn(whole[:-2], False), refused["key_limit"]
        assert first is not None and turn.repeated(whole) == first.data and refused["key_limit"] == before + 1
        closing, long, new = head(2, "Connection: close"), head(1 << 20), head(2, "X-Other: x")
        assert turn(closing, False) and turn(long, False)
        for unlike in (b"", whole[:-1], whole + b"x", whole + whole, closing + b"{}", long + b"{}", new + b"{}"):
            assert turn.repeated(unlike) is None
        assert shed.turn([]).repeated(whole) is None, "another turn"
        for one in links:
            one.close()
