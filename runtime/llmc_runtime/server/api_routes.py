"""The routes of the API, each declared once.

The application's routes, the jobs of text processes, load shedding and the OpenAPI description derive from these
declarations. Probes are in http.probes; the routes of stored responses, which have several methods, in openapi.
OTHER_ROUTES are routes of other servers (vLLM, SGLang, OpenAI, Ollama, TGI) that this one lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from llmc_runtime.ignored_options import NO_ADAPTERS
from llmc_runtime.server.requests import messages_request, responses_request
from llmc_runtime.server.requests.messages_request import CountRequest, MessagesRequest
from llmc_runtime.server.requests.pooling_request import (
    ClassifyRequest,
    EmbeddingRequest,
    Pooled,
    RerankRequest,
    ScoreRequest,
)
from llmc_runtime.server.requests.request_fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from llmc_runtime.server.requests.responses_request import InputTokensRequest, ResponsesRequest

_SLEEP = "stop the server; a start takes seconds"
_TEXT = "prompts are text"
_IDS = "use /v1/completions, which takes token ids"
_BATCHES = "send the requests of a file one by one"
_OLLAMA = "Ollama's API is not served: use "
_MOVED = "with an admin key, use "
_NO_TRAINING = "models are only served: train and evaluate them elsewhere"
_NO_TOOLS = "the server stores no files and runs no tools"
_ENGINES = "the number of engines is fixed at start: --data-parallel-size"

# path -> what to use instead, or why there is nothing like it
OTHER_ROUTES: Mapping[str, str] = MappingProxyType(
    {
        "/pooling": "hidden states of single tokens are not returned: use /v1/embeddings, /classify or /score",
        "/v1/audio/transcriptions": _TEXT, "/v1/audio/translations": _TEXT,
        "/v1/audio/speech": "only text is generated", "/v1/images/generations": "only text is generated",
        "/docs": "/openapi.json describes the API", "/redoc": "/openapi.json describes the API",
        "/invocations": "use the route of the task, such as /v1/chat/completions",
        "/reset_prefix_cache": f"{_MOVED}/admin/reset_prefix_cache",
        "/flush_cache": f"{_MOVED}/admin/reset_prefix_cache", "/abort_requests": f"{_MOVED}/admin/abort",
        "/pause": _SLEEP, "/resume": _SLEEP, "/is_paused": _SLEEP,
        "/scale_elastic_ep": _ENGINES, "/is_scaling_elastic_ep": _ENGINES,
        "/start_profile": f"{_MOVED}/admin/trace", "/stop_profile": f"{_MOVED}/admin/trace",
        "/sleep": _SLEEP, "/wake_up": _SLEEP, "/is_sleeping": _SLEEP,
        "/v1/load_lora_adapter": NO_ADAPTERS, "/v1/unload_lora_adapter": NO_ADAPTERS,
        "/v1/completions/render": "use /tokenize", "/v1/chat/completions/render": "use /tokenize",
        "/api/chat": f"{_OLLAMA}/v1/chat/completions", "/api/generate": f"{_OLLAMA}/v1/completions",
        "/api/tags": f"{_OLLAMA}/v1/models", "/api/show": f"{_OLLAMA}/v1/models", "/api/version": f"{_OLLAMA}/version",
        "/api/embed": f"{_OLLAMA}/v1/embeddings", "/api/embeddings": f"{_OLLAMA}/v1/embeddings",
        "/generate_stream": "use /v1/completions with stream", "/embed": "use /v1/embeddings",
        "/v2/embed": "use /v1/embeddings",
        "/v1/moderations": "use /classify, with a model that classifies",
        "/inference/v1/generate": _IDS, "/generate": _IDS,
        "/v1/chat/completions/batch": "send the conversations one by one",
        "/v1/realtime": "use /v1/responses with stream",
        "/collective_rpc": "engine processes take no calls",
    }
)  # fmt: skip
# The same for these paths and all below them
OTHER_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "/v1/batches": _BATCHES, "/v1/files": _BATCHES, "/v1/uploads": _BATCHES, "/v1/messages/batches": _BATCHES,
        "/v1/assistants": "use /v1/responses", "/v1/threads": "use /v1/responses",
        "/v1/conversations": "use /v1/responses with previous_response_id",
        "/v1/vector_stores": _NO_TOOLS, "/v1/containers": _NO_TOOLS, "/v1/skills": _NO_TOOLS,
        "/v1/fine_tuning": _NO_TRAINING, "/v1/evals": _NO_TRAINING,
        "/openai/deployments": "Azure's paths are not served: use an OpenAI client, with a base URL that ends in /v1",
    }
)  # fmt: skip
# The same for requests whose path another route has with other methods, as that of a stored response
OTHER_POSTS: Mapping[str, str] = MappingProxyType(
    {"/v1/responses/compact": "conversations are not compacted: send a shorter input"}
)
_PREFIX = "/v1"


@dataclass(frozen=True)
class PostRoute:
    """An endpoint with a JSON body of the type `request`, served at each of `paths`.

    summary:       for the OpenAPI description
    job:           the kind of the frame that takes a large body to a text process (see text_messages)
    id_prefix:     of the ids of its responses, "" if they have none
    prompt_param:  the field with the prompt, which errors name
    names:         how errors rename fields (see errors.renamed)
    generates:     whether it generates tokens; its responses may be streamed, and its load is shed
    """

    paths: tuple[str, ...]
    request: type[msgspec.Struct]
    summary: str
    job: bytes
    id_prefix: str = ""
    prompt_param: str = ""
    names: tuple[tuple[str, str], ...] = ()
    generates: bool = False


COMPLETIONS = PostRoute(
    ("/v1/completions",), CompletionRequest, "Continue prompts", b"C", "cmpl-", "prompt", generates=True
)
CHATS = PostRoute(
    ("/v1/chat/completions",), ChatRequest, "Answer a conversation", b"H", "chatcmpl-", "messages", generates=True
)
RESPONSES = PostRoute(
    ("/v1/responses",), ResponsesRequest, "Create a response", b"S", "resp_", "input",
    names=responses_request.NAMES, generates=True,
)  # fmt: skip
INPUT_TOKENS = PostRoute(
    ("/v1/responses/input_tokens",), InputTokensRequest, "The number of tokens of a response's input", b"B",
    names=responses_request.NAMES,
)  # fmt: skip
MESSAGES = PostRoute(
    ("/v1/messages",), MessagesRequest, "Create a message, as in Anthropic's Messages API", b"M", "msg_",
    "messages", names=messages_request.NAMES, generates=True,
)  # fmt: skip
COUNT_TOKENS = PostRoute(
    ("/v1/messages/count_tokens",), CountRequest, "The number of tokens of a message's prompt", b"T",
    names=messages_request.NAMES,
)  # fmt: skip
EMBEDDINGS = PostRoute(
    ("/v1/embeddings",), EmbeddingRequest, "Embeddings of texts, from a model that embeds", b"E", "embd-",
    "input",
)  # fmt: skip
SCORES = PostRoute(("/v1/score", "/score"), ScoreRequest, "Scores of pairs of texts", b"O", "score-", "text_2")
RERANKING = PostRoute(
    ("/v1/rerank", "/rerank", "/v2/rerank"), RerankRequest, "Documents by their scores", b"Q", "rerank-",
    "documents",
)  # fmt: skip
CLASSIFICATION = PostRoute(
    ("/classify",), ClassifyRequest, "Classes of texts, from a model that classifies", b"L", "classify-", "input"
)
TOKENIZE = PostRoute(("/tokenize",), TokenizeRequest, "Token ids of a text or a conversation", b"K")
DETOKENIZE = PostRoute(("/detokenize",), DetokenizeRequest, "The text of token ids", b"U")

POST_ROUTES: Sequence[PostRoute] = (
    COMPLETIONS, CHATS, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS, EMBEDDINGS, SCORES, RERANKING, CLASSIFICATION,
    TOKENIZE, DETOKENIZE,
)  # fmt: skip
POOLED_ROUTES: Sequence[PostRoute] = tuple(route for route in POST_ROUTES if issubclass(route.request, Pooled))


STORED = "/v1/responses/{response_id}"  # route of a stored response, with several methods


@dataclass(frozen=True)
class GetRoute:
    """An endpoint without a body, served at each of `paths`.

    summary:  for the OpenAPI description
    media:    the media type of its response
    kind:     the type of its response in JSON schema
    """

    paths: tuple[str, ...]
    summary: str
    media: str = "application/json"
    kind: str = "object"


MODELS = GetRoute(("/v1/models",), "The served models")
MODEL = GetRoute(("/v1/models/{name}",), "One served model")
TOKENIZER_INFO = GetRoute(("/tokenizer_info",), "The named special tokens")
VERSION = GetRoute(("/version",), "The server's version")
SERVER_INFO = GetRoute(("/server_info", "/get_server_info"), "The version, the model and the limits of the engine")
MODEL_INFO = GetRoute(("/model_info", "/get_model_info"), "The name and the kind of the model")
METRICS = GetRoute(("/metrics",), "Metrics for Prometheus", "text/plain", "string")
LOAD = GetRoute(("/load",), "The number of open requests")
ROUTER_LOAD = GetRoute(
    ("/get_load",), "The numbers of open requests and tokens, as SGLang's router reads them", kind="array"
)
OPENAPI = GetRoute(("/openapi.json",), "This description")
PAGE = GetRoute(("/",), "A chat and metrics, for a browser", "text/html", "string")

GET_ROUTES: Sequence[GetRoute] = (
    MODELS, MODEL, TOKENIZER_INFO, VERSION, SERVER_INFO, MODEL_INFO, METRICS, LOAD, ROUTER_LOAD, OPENAPI, PAGE,
)  # fmt: skip


def not_a_route(path: str, served: frozenset[str]) -> str:
    """Return the message of a 404 for `path`, which is none of the `served` paths."""
    path = path.rstrip("/")
    cause = "there is no such route"
    if path in OTHER_ROUTES:
        return f"{cause}: {OTHER_ROUTES[path]}"
    for family, remark in OTHER_FAMILIES.items():
        if path == family or path.startswith(family + "/"):
            return f"{cause}: {remark}"
    if _PREFIX + path in served:
        return f"{cause}: use {_PREFIX}{path}; the base URL of OpenAI's clients ends in {_PREFIX}"
    if path.startswith(_PREFIX * 2) and (route := path.removeprefix(_PREFIX)) in served:
        return f"{cause}: use {route}; the base URL has {_PREFIX} twice"
    if path.startswith(_PREFIX) and (route := path.removeprefix(_PREFIX)) in served:
        return f"{cause}: use {route}, without {_PREFIX}"
    if (route := path[max(0, path.rfind(f"{_PREFIX}/")) :]) in served:
        return f"{cause}: use {route}; to serve under a path in front of it, start the server with --root-path"
    return cause
