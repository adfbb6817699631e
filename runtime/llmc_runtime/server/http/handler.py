"""A decorator for route handlers that converts exceptions into error responses."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from llmc_runtime.server.http.errors import ApiError, internal
from llmc_runtime.server.http.replies import Gone, as_error, place

log = logging.getLogger("llmc.serve")
_GONE = 499  # never sent, as the client has disconnected

Handler = Callable[[Any, Request], Awaitable[Response]]


def noted(scope: Scope, error: ApiError) -> None:
    """Record the error in the request's log line."""
    record = scope.get("llmc.record")
    if record is not None:
        record.fail(error.code, error.reason)


def told(handler: Handler) -> Handler:
    """Wrap a handler, a method of an object with `serving`.

    API errors become responses. For unexpected exceptions the place is logged, and the client gets a generic error.
    """

    @functools.wraps(handler)
    async def safe(self: Any, request: Request) -> Response:
        try:
            return await handler(self, request)
        except ApiError as e:
            noted(request.scope, e)
            if e.status >= 500 and e.reason is None:  # refusals appear in the request's own line
                log.warning("%s %s: %s%s", request.scope["llmc.id"], e.status, e.message, place(e.__cause__))
            return as_error(e)
        except (Gone, ClientDisconnect):
            self.serving.meters.gone()
            return Response(status_code=_GONE)
        except Exception as e:
            log.error("%s failed%s", request.scope["llmc.id"], place(e))
            return as_error(internal())

    return safe
