"""Routes of other servers (vLLM, OpenAI, Ollama, TGI) that this one lacks, and what to use instead, for a 404."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_SLEEP = "stop the server; a start takes seconds"
_ADAPTERS = "adapters are not supported: merge them into the weights, and compile"
_TEXT = "prompts are text"
_IDS = "use /v1/completions, which takes token ids"
_BATCHES = "send the requests of a file one by one"
_OLLAMA = "Ollama's API is not served: use "
_MOVED = "with an admin key, use "

# path -> what to use instead, or why there is nothing like it
OTHER_ROUTES: Mapping[str, str] = MappingProxyType(
    {
        "/pooling": "hidden states of single tokens are not returned: use /v1/embeddings, /classify or /score",
        "/v1/audio/transcriptions": _TEXT, "/v1/audio/translations": _TEXT,
        "/v1/audio/speech": "only text is generated", "/v1/images/generations": "only text is generated",
        "/docs": "/openapi.json describes the API", "/redoc": "/openapi.json describes the API",
        "/invocations": "use the route of the task, such as /v1/chat/completions",
        "/reset_prefix_cache": f"{_MOVED}/admin/reset_prefix_cache",
        "/start_profile": f"{_MOVED}/admin/trace", "/stop_profile": f"{_MOVED}/admin/trace",
        "/sleep": _SLEEP, "/wake_up": _SLEEP, "/is_sleeping": _SLEEP,
        "/v1/load_lora_adapter": _ADAPTERS, "/v1/unload_lora_adapter": _ADAPTERS,
        "/v1/completions/render": "use /tokenize", "/v1/chat/completions/render": "use /tokenize",
        "/api/chat": f"{_OLLAMA}/v1/chat/completions", "/api/generate": f"{_OLLAMA}/v1/completions",
        "/api/tags": f"{_OLLAMA}/v1/models", "/api/show": f"{_OLLAMA}/v1/models", "/api/version": f"{_OLLAMA}/version",
        "/api/embed": f"{_OLLAMA}/v1/embeddings", "/api/embeddings": f"{_OLLAMA}/v1/embeddings",
        "/generate_stream": "use /v1/completions with stream", "/embed": "use /v1/embeddings",
        "/v1/moderations": "use /classify, with a model that classifies",
        "/inference/v1/generate": _IDS, "/generate": _IDS,
        "/v1/batches": _BATCHES, "/v1/files": _BATCHES,
        "/collective_rpc": "engine processes take no calls",
    }
)  # fmt: skip
_PREFIX = "/v1"


def not_a_route(path: str, served: frozenset[str]) -> str:
    """Return the message of a 404 for `path`, which is none of the `served` paths."""
    path = path.rstrip("/")
    cause = "there is no such route"
    if path in OTHER_ROUTES:
        return f"{cause}: {OTHER_ROUTES[path]}"
    if _PREFIX + path in served:
        return f"{cause}: use {_PREFIX}{path}; the base URL of OpenAI's clients ends in {_PREFIX}"
    if path.startswith(_PREFIX * 2) and (route := path.removeprefix(_PREFIX)) in served:
        return f"{cause}: use {route}; the base URL has {_PREFIX} twice"
    return cause
