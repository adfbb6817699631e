"""Closed connections leave nothing behind."""

from __future__ import annotations

import asyncio
import gc

import pytest

pytest.importorskip("starlette")
from llmc_runtime.server.http.lingering_close import Lingering
from llmc_runtime.server.protocol import HttpConnection

from tests.runtime.served import served
from tests.runtime.test_server_load import until
from tests.runtime.test_server_shed import BODY, Link, head, occupy, own_loop


@own_loop
def test_closed_connections_are_freed_without_the_garbage_collector(own_loop: bool) -> None:
    with served(own_loop=own_loop) as server:
        gc.collect()
        gc.disable()
        try:
            for more in ((), ("Connection: close",), ("Expect: nothing",)):
                link = Link(server)
                link.send(head(len(BODY), *more, key=""), BODY)
                link.answer()
                link.close()
            occupy(server).close()  # its answer is cut off
            gone = (HttpConnection, Lingering, asyncio.Transport)
            until(lambda: not any(issubclass(type(one), gone) for one in gc.get_objects()))
        finally:
            gc.enable()
