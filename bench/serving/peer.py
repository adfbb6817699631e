"""A minimal Starlette handler on uvicorn (h11) that streams prepared events: the upper limit of a server in Python.

python -m bench.serving.peer BYTES_AN_EVENT
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": %d, "completion_tokens": %d}}\n\n'


def application(size: int) -> Starlette:
    """Return an application whose POST /v1/completions streams `max_tokens` events of `size` bytes."""
    event = json.dumps({"choices": [{"index": 0, "text": " word", "finish_reason": None}], "pad": ""})
    event = f"data: {event[:-2]}{'x' * (size - len(event) - 8)}" + '"}\n\n'
    assert len(event) == size

    async def completions(request: Request) -> Response:
        request_body = json.loads(await request.body())

        async def events() -> AsyncIterator[str]:
            for _ in range(request_body["max_tokens"]):
                yield event
                await asyncio.sleep(0)  # tokens arrive one by one; the handler waits for each
            yield (_USAGE % (len(request_body["prompt"]), request_body["max_tokens"])).decode()
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "bare", "vocab_size": 1000}]})

    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/v1/models", models)]
    return Starlette(routes=routes)


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"bare at http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
    config = uvicorn.Config(application(int(sys.argv[1])), http="h11", ws="none", lifespan="off", log_config=None)
    asyncio.run(uvicorn.Server(config).serve([listening]))
