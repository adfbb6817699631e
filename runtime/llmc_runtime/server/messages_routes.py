"""The routes under /v1/messages."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from llmc_runtime.server.endpoint import Endpoint
from llmc_runtime.server.http.errors import renamed
from llmc_runtime.server.http.replies import as_json, catch_errors
from llmc_runtime.server.messages.messages import Messages
from llmc_runtime.server.requests.messages_request import NAMES, CountRequest, MessagesRequest, to_chat
from llmc_runtime.server.text_pool.jobs import counted
from llmc_runtime.server.text_pool.text_messages import COUNT, MESSAGES


class MessagesRoutes(Endpoint):
    """Creates messages, and counts the tokens of requests."""

    @catch_errors
    async def create(self, request: Request) -> Response:
        """POST /v1/messages."""
        with renamed(NAMES):
            async with self._read(request, MessagesRequest, MESSAGES) as (fields, job):
                call = self._call(request, "msg_", "messages")
                answer = Messages(self.serving, fields, call, job)
                return await self._reply(request, answer, call, stream=bool(fields.stream))

    @catch_errors
    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: the number of tokens of the prompt of a message."""

        async def run(fields: CountRequest) -> Response:
            serving, prompting = self.serving, self.serving.prompting
            arguments = counted(to_chat(fields), serving.formats)
            async with serving.lanes.slot(request.scope["llmc.key"]):
                return as_json({"input_tokens": await prompting.in_thread(prompting.count, *arguments)})

        with renamed(NAMES):
            return await self._text(request, CountRequest, COUNT, run)
