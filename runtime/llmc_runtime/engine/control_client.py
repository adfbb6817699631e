"""The front end's side of control RPCs (see control_rpc)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmc_runtime.engine.messages import ControlReply, ControlRequest
from llmc_runtime.format.errors import LlmcError


class ControlClient:
    """Sends requests and awaits their replies. Belongs to one event loop."""

    def __init__(self) -> None:
        self._pending: dict[int, asyncio.Future[ControlReply]] = {}
        self._next = 0

    async def call(
        self, send: Callable[[ControlRequest], None], method: str, seconds: float, timeout: float
    ) -> ControlReply:
        """Call a method that takes `seconds`, and return the reply.

        Raises LlmcError E662 if none comes within `timeout` more seconds, and the engine's error if it ends.
        """
        number, self._next = self._next, self._next + 1
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            send(ControlRequest(number, method, seconds))
            async with asyncio.timeout(seconds + timeout):
                return await future
        except TimeoutError:
            cause = f"the engine did not answer within {seconds + timeout:g} s"
            raise LlmcError("E662", cause, "try again when its step has ended") from None
        finally:
            del self._pending[number]

    def deliver(self, reply: ControlReply) -> None:
        """Deliver a reply."""
        future = self._pending.get(reply.number)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_all(self, error: LlmcError) -> None:
        """Fail all pending calls."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)
