"""The attacks of row 16, by name: clients that read a byte now and then, or nothing, of large responses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

from bench.attacks.further import CHAT, COMPLETIONS, Client, Senders, clients
from bench.attacks.further_rows import EMBEDDINGS, Attacks, completion
from bench.attacks.watch import request

_EVERY = 1.0  # seconds between two bytes
_WINDOW = 2048  # bytes that the kernel of the client receives ahead


def reading(path: str, body: Any, *, times: int = 1, half: bool = False) -> Client:
    """Return a client that sends a request `times` times in a pipeline, and reads a byte a second.

    half: it closes its side of the connection behind them
    """

    async def client(senders: Senders, number: int) -> None:
        loop, data = asyncio.get_running_loop(), request(senders.door.host, senders.door.key, path, body) * times
        while not senders.over:
            with contextlib.suppress(OSError, TimeoutError), socket.socket() as link:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WINDOW)
                link.setblocking(False)
                async with asyncio.timeout(max(0.01, senders.end - time.monotonic())):
                    await loop.sock_connect(link, (senders.door.host, senders.door.port))
                    await loop.sock_sendall(link, data)
                    if half:
                        link.shutdown(socket.SHUT_WR)
                    while await loop.sock_recv(link, 1):
                        await asyncio.sleep(_EVERY)
            senders.statuses[0] += 1
            await asyncio.sleep(0.05)

    return client


def readers() -> Attacks:
    """Row 16: responses that clients do not read in time."""
    long = {"max_tokens": 400, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "x"}], "n": 16, "logprobs": True, "top_logprobs": 20, **long}
    scored = completion(prompt=[[5] * 300] * 8, max_tokens=1, prompt_logprobs=20)
    loads = {
        "24 x n=16 streams": (24, reading(COMPLETIONS, completion(n=16, stream=True, **long))),
        "4 x 16 prompts, streamed": (4, reading(COMPLETIONS, completion(prompt=["x"] * 16, stream=True, **long))),
        "40 x n=16 streams with 20 alternatives": (40, reading(CHAT, {**chat, "stream": True})),
        "40 x n=16 with 20 alternatives": (40, reading(CHAT, chat)),
        "40 x prompt_logprobs": (40, reading(COMPLETIONS, scored)),
        "40 x 2,048 embeddings": (40, reading(EMBEDDINGS, {"input": ["x"] * 2048})),
        "400 x 40 /openapi.json": (400, reading("/openapi.json", None, times=40)),
        "400 x 40 /metrics": (400, reading("/metrics", None, times=40)),
        "100 x half-closed streams": (100, reading(COMPLETIONS, completion(n=4, stream=True, **long), half=True)),
    }
    return {f"a byte a second: {name}": clients(count, client) for name, (count, client) in loads.items()}
