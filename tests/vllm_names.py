"""vLLM's names and those of this project, as parts of docs/vllm.md; `python tests/test_declared.py` writes them.

The lists name what vLLM 0.25 has. Whether llmc has them is determined from the code.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from unittest.mock import Mock

# Of class LLM: name -> where it has another name here, or what is different.
LLM_METHODS: Mapping[str, str] = {
    "generate": "", "chat": "", "get_tokenizer": "", "get_default_sampling_params": "", "get_metrics": "",
    "reset_prefix_cache": "", "encode": "raises E648: use `embed`, `classify` or `score`",
    "embed": "", "classify": "", "reward": "raises E648: hidden states of single tokens are not returned", "score": "",
    "beam_search": "raises E648: use `n` with sampling", "sleep": "close the LLM; opening it again takes seconds",
    "wake_up": "", "start_profile": "`LLM(..., trace=FILE)`: a trace of the engine's steps", "stop_profile": "",
    "collective_rpc": "engine processes take no calls",
    "apply_model": "the runtime has no torch module",
}  # fmt: skip
CLASSES: Mapping[str, str] = {
    "LLM": "", "SamplingParams": "", "StructuredOutputsParams": "", "TextPrompt": "", "TokensPrompt": "",
    "RequestOutput": "", "CompletionOutput": "", "AsyncEngineArgs": "`EngineArgs`", "EngineArgs": "",
    "AsyncLLMEngine": "`AsyncLLM`", "LLMEngine": "`LLM`, or `AsyncLLM`", "PoolingParams": "",
    "EmbeddingRequestOutput": "", "ClassificationRequestOutput": "", "ScoringRequestOutput": "",
    "BeamSearchParams": "use `n` with sampling", "ModelRegistry": "models are traced from transformers",
}  # fmt: skip
ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/tokenizer_info", "/health",
    "/ping", "/load", "/version", "/metrics", "/openapi.json", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/completions/render", "/v1/chat/completions/render",
    "/inference/v1/generate", "/docs", "/invocations", "/reset_prefix_cache", "/server_info", "/sleep", "/wake_up",
    "/is_sleeping", "/start_profile", "/stop_profile", "/collective_rpc",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions/batch", "/v1/realtime",
    "/abort_requests", "/pause", "/resume", "/is_paused", "/scale_elastic_ep", "/is_scaling_elastic_ep",
)  # fmt: skip
METRICS: Mapping[str, str] = {
    "num_requests_running": "", "num_requests_waiting": "", "kv_cache_usage_perc": "", "cache_config_info": "",
    "prompt_tokens": "", "prompt_tokens_cached": "", "generation_tokens": "", "request_success": "",
    "num_preemptions": "", "prefix_cache_queries": "", "prefix_cache_hits": "", "iteration_tokens_total": "",
    "time_to_first_token_seconds": "", "inter_token_latency_seconds": "",
    "request_time_per_output_token_seconds": "", "e2e_request_latency_seconds": "", "request_queue_time_seconds": "",
    "request_inference_time_seconds": "", "request_prefill_time_seconds": "", "request_decode_time_seconds": "",
    "request_prompt_tokens": "", "request_generation_tokens": "", "request_params_n": "",
    "request_params_max_tokens": "", "spec_decode_num_drafts": "", "spec_decode_num_draft_tokens": "",
    "spec_decode_num_accepted_tokens": "", "spec_decode_num_accepted_tokens_per_pos": "",
    "request_max_num_generation_tokens": "", "request_prefill_kv_computed_tokens": "",
    "external_prefix_cache_queries": "the KV cache stays in one engine", "external_prefix_cache_hits": "",
    "mm_cache_queries": "prompts are text", "mm_cache_hits": "", "lora_requests_info": "adapters are not supported",
    "engine_sleep_state": "sleep mode is not supported",
}  # fmt: skip


def table(head: str, names: Mapping[str, str], here: set[str]) -> Iterator[str]:
    """Return the names that are the same here as a sentence, and the others with their remarks as a table.

    An empty remark of a missing name repeats the one before it.
    """
    same, others, remark = [], dict[str, list[str]](), ""
    for name, text in names.items():
        remark = text or remark
        (same if name in here else others.setdefault(remark, [])).append(f"`{name}`")
    yield from textwrap.wrap(f"The same: {', '.join(same)}.", 120, break_long_words=False, break_on_hyphens=False)
    yield ""
    yield f"| missing {head} | use instead, or reason |"
    yield "|---|---|"
    yield from (f"| {', '.join(missing)} | {remark} |" for remark, missing in others.items())


def python_api() -> Iterator[str]:
    """The classes, and the methods of LLM."""
    import llmc_runtime

    methods = {name for name in dir(llmc_runtime.LLM) if not LLM_METHODS.get(name, "").startswith("raises")}
    yield "Classes:"
    yield ""
    yield from table("class", CLASSES, set(llmc_runtime.__all__))
    yield ""
    yield "Methods of `LLM`:"
    yield ""
    yield from table("method", LLM_METHODS, methods)


def endpoints() -> Iterator[str]:
    """The routes."""
    from llmc_runtime.server.api_routes import OTHER_ROUTES

    remarks = {path: re.sub(r"/\w[\w./]*", r"`\g<0>`", OTHER_ROUTES.get(path, "")) for path in ENDPOINTS}
    yield from table("route", remarks, served_routes())


def served_routes() -> set[str]:
    """The paths of the server's routes, without those under /admin/."""
    from llmc_runtime.server.app import Endpoints

    return {route.path for route in Endpoints(Mock(), Mock()).routes()}


def metrics() -> Iterator[str]:
    """The metrics, without prefixes and suffixes."""
    yield from table("metric", METRICS, exported())


def exported() -> set[str]:
    """The names of the metrics of a server, without the prefix and the suffix of counters."""
    from llmc_runtime.metrics import initial_stats
    from llmc_runtime.server.operations.metrics_exporter import ServerMetrics

    families = ServerMetrics("toy", initial_stats).collect()
    return {family.name.removeprefix("llmc:") for family in families} | {"cache_config_info"}  # of an open engine
