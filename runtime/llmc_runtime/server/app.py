"""The routes of the server, and its assembly as an ASGI application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmc_runtime import __version__
from llmc_runtime.format.names import GENERATE
from llmc_runtime.server import api_routes as api
from llmc_runtime.server.admin import Admin
from llmc_runtime.server.api_routes import OTHER_POSTS, not_a_route
from llmc_runtime.server.endpoint import Endpoint, Handler
from llmc_runtime.server.http.auth import Guard, Keys, Limits
from llmc_runtime.server.http.connection_limit import MAX_CONNECTIONS
from llmc_runtime.server.http.errors import ApiError, not_found
from llmc_runtime.server.http.middleware import NormalizeTarget, RequestShares, allow_origins, normalize_root
from llmc_runtime.server.http.replies import as_error, as_json, catch_errors
from llmc_runtime.server.load_shedding import LoadShedder
from llmc_runtime.server.messages_api.messages_response import MessagesResponse
from llmc_runtime.server.openai.chat import ChatResponse
from llmc_runtime.server.openai.completions import CompletionResponse
from llmc_runtime.server.openai.pooled import PooledResponse
from llmc_runtime.server.openai.responses import ResponsesResponse
from llmc_runtime.server.openapi import description
from llmc_runtime.server.operations.metrics_exporter import CONTENT_TYPE
from llmc_runtime.server.page import page_route
from llmc_runtime.server.requests.pooling_request import repeats
from llmc_runtime.server.responses_routes import ResponsesRoutes
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.text_pool.jobs import ANSWERS


def application(
    serving: Serving,
    keys: Sequence[str] = (),
    limits: Limits | None = None,
    hosts: Sequence[str] | None = None,
    root_path: str = "",
    admin_keys: Sequence[str] = (),
    key_scope: str = "all",
    shed: LoadShedder | None = None,
    origins: Sequence[str] = (),
    connections: int = MAX_CONNECTIONS,
) -> ASGIApp:
    """Return the server as an ASGI application.

    `hosts` are the accepted names in Host headers (None: any). `root_path` is a path prefix that a proxy may or may not
    strip. Without `admin_keys` there are no routes under /admin/. `key_scope` names the paths that require one of
    `keys` (auth.KEY_SCOPES). `shed` refuses requests from their heads; its check of keys is set here. Web
    pages of `origins` may use the server, which has at most `connections` connections.
    """
    limits, root_path = limits or Limits(), normalize_root(root_path)
    routes = [*Endpoints(serving, limits, root_path).routes(), page_route(needs_key=bool(keys))]
    if admin_keys:
        routes += Admin(serving, limits).routes()
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    shed = shed or LoadShedder(serving)
    shared = RequestShares(app, connections, serving.too_many_requests) if len(keys) > 1 else app
    guarded = Guard(shared, Keys(keys), limits, hosts, Keys(admin_keys), key_scope, shed.refuse)
    shed.check, shed.lane_of = guarded.check, guarded.lane_of
    server = NormalizeTarget(guarded, root_path)
    return allow_origins(server, origins) if origins else server


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        served = frozenset(route.path for route in request.app.routes if isinstance(route, Route))
        return as_error(not_found(not_a_route(request.scope["path"], served)), request.scope["path"])
    if request.method == "POST" and (remark := OTHER_POSTS.get(request.scope["path"].rstrip("/"))):
        return as_error(not_found(f"there is no such route: {remark}"), request.scope["path"])
    headers = dict(error.headers or {})
    cause = f"this route supports {headers.get('Allow')} only" if error.status_code == 405 else "the request is refused"
    refused = ApiError(cause, status=error.status_code, code="method_not_allowed", headers=headers)
    return as_error(refused, request.scope["path"])


class Endpoints(Endpoint):
    """The endpoints of one served model."""

    def __init__(self, serving: Serving, limits: Limits, root_path: str = "") -> None:
        super().__init__(serving, limits)
        self._description = msgspec.json.encode(
            description() | ({"servers": [{"url": root_path}]} if root_path else {})
        )

    def routes(self) -> list[Route]:
        """Return all routes, each with and without a trailing slash."""
        responses = ResponsesRoutes(self.serving, self.limits)
        gets: Mapping[api.GetRoute, Handler] = {
            api.MODELS: self.models,
            api.TOKENIZER_INFO: self.tokenizer_info,
            api.VERSION: self.version,
            api.SERVER_INFO: self.server_info,
            api.MODEL_INFO: self.model_info,
            api.METRICS: self.metrics,
            api.LOAD: self.load,
            api.ROUTER_LOAD: self.get_load,
            api.OPENAPI: self.openapi,
        }
        posts: Mapping[api.PostRoute, Handler] = {
            api.COMPLETIONS: self.handler(api.COMPLETIONS, CompletionResponse),
            api.CHATS: self.handler(api.CHATS, ChatResponse),
            api.RESPONSES: self.handler(api.RESPONSES, ResponsesResponse, responses.is_long),
            api.INPUT_TOKENS: responses.input_tokens,
            api.MESSAGES: self.handler(api.MESSAGES, MessagesResponse),
            **{route: self.handler(route, PooledResponse, lambda request: repeats) for route in api.POOLED_ROUTES},
            **{route: self.text_handler(route, answer) for route, answer in ANSWERS.items()},
        }
        endpoints = [
            ("GET", "/health", self.health), ("GET", "/ping", self.health), ("GET", "/ready", self.ready),
            *(("GET", path, handler) for route, handler in gets.items() for path in route.paths),
            *(("POST", path, handler) for route, handler in posts.items() for path in route.paths),
            ("GET DELETE", api.STORED, responses.stored),
            ("GET", f"{api.STORED}/input_items", responses.input_items),
        ]  # fmt: skip
        routes = [
            Route(path + end, handler, methods=verbs.split()) for verbs, path, handler in endpoints for end in ("", "/")
        ]
        return [*routes, Route("/v1/models/{name:path}", self.one_model, methods=["GET"])]

    @catch_errors
    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info: the named special tokens. The chat template is not exposed; /tokenize applies it."""
        names, length = self.serving.prompting.tokenizer.named_tokens, self.serving.llm.config.max_model_len
        return as_json({**names, "model_max_length": length})

    @catch_errors
    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        return as_json({"object": "list", "data": [self._model(name) for name in self.serving.names]})

    @catch_errors
    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        self.serving.check_model(name)
        return as_json(self._model(name))

    async def health(self, request: Request) -> Response:
        """GET /health and /ping: 200 while the engine is running or the server is draining."""
        return Response(status_code=200 if self.serving.is_alive else 503)

    @catch_errors
    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 while requests are admitted."""
        self.serving.check_ready()
        self.serving.admission.check_wait()
        return Response()

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return as_json({"version": __version__})

    async def load(self, request: Request) -> Response:
        """GET /load: the number of sequences that are running or waiting, under vLLM's name."""
        return as_json({"server_load": self.serving.admission.open_sequences})

    async def get_load(self, request: Request) -> Response:
        """GET /get_load: the load as SGLang's router reads it, in one entry for all engines of the server.

        `num_tokens` counts the prompts and the maximum outputs of the open sequences, running or waiting.
        """
        admission, waiting = self.serving.admission, self.serving.llm.num_waiting
        tokens = {"num_waiting_reqs": waiting, "num_tokens": admission.open_tokens}
        return as_json([{"dp_rank": 0, "num_reqs": admission.open_sequences, **tokens}])

    async def server_info(self, request: Request) -> Response:
        """GET /server_info, /get_server_info: the version, the names of the model, and the limits of the engine."""
        config, calls = self.serving.llm.config, self.serving.formats.calls
        return as_json(
            {
                "version": __version__, "models": self.serving.names, "served_model_name": self.serving.names[0],
                "data_parallel_size": len(self.serving.llm.engines), "max_model_len": config.max_model_len,
                "max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens,
                "block_size": config.page_size, "num_blocks": config.num_pages, "vocab_size": config.vocab_size,
                "enable_prefix_caching": config.prefix_caching, "num_state_snapshots": config.snapshots or 0,
                "tool_call_parser": None if calls is None else calls.name,
                "separates_reasoning": self.serving.formats.reasoning is not None,
                "stores_responses": self.serving.stored.enabled,
                "task": GENERATE if self.serving.llm.pooling is None else self.serving.llm.pooling.task,
            }
        )  # fmt: skip

    async def model_info(self, request: Request) -> Response:
        """GET /model_info, /get_model_info: the name of the model and whether it generates, under SGLang's names."""
        return as_json({"model_path": self.serving.names[0], "is_generation": self.serving.llm.pooling is None})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(await self.serving.metrics.shared_text(), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        return Response(self._description, media_type="application/json")

    def _model(self, name: str) -> dict[str, Any]:
        config, pooling = self.serving.llm.config, self.serving.llm.pooling
        segments = 1 if pooling is None else pooling.segments
        return {
            "id": name, "object": "model", "created": self.serving.created, "owned_by": "llmc", "root": name,
            "parent": None, "max_model_len": config.max_model_len, "vocab_size": config.vocab_size // segments,
        }  # fmt: skip
