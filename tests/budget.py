"""The budget of the server: for every route, header and request field, what bounds the work that it causes.

docs/budgets.md shows it as lists, which `python tests/test_budget.py` writes. A limit appears here as {name}, a
name of LIMITS, so that the page has the value of the constant; `where` names the modules of llmc_runtime that enforce a
row. tests/test_budget.py walks the server's description and fails for a field without a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# name: (module below llmc_runtime, attribute, unit)
LIMITS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "body": ("server.http.auth", "Limits.body", "bytes"),
        "body_seconds": ("server.http.auth", "Limits.body_seconds", "s"),
        "headers": ("server.http.auth", "Limits.headers", "bytes"),
        "header_count": ("server.http.auth", "Limits.header_count", ""),
        "head": ("server.protocol", "MAX_HEAD_BYTES", "bytes"),
        "head_seconds": ("server.protocol", "HttpConnection.head_seconds", "s"),
        "write_seconds": ("server.protocol", "HttpConnection.write_seconds", "s"),
        "read": ("server.protocol", "_READ", "bytes"),
        "handshakes": ("server.http.fair_selector", "MAX_HANDSHAKES", ""),
        "handshake_seconds": ("server.http.event_loop", "ServerLoop.handshake_seconds", "s"),
        "tls_overhead": ("server.http.tls", "MAX_OVERHEAD", "bytes"),
        "probes": ("server.http.fair_selector", "MAX_PROBES", ""),
        "probe_seconds": ("server.load_shedding", "_FRESH_SECONDS", "s"),
        "heads": ("server.http.read_turns", "MAX_HEADS", ""),
        "short_body": ("server.endpoint", "_SHORT_BYTES", "bytes"),
        "accept_seconds": ("server.http.light_connections", "_TURN_SECONDS", "s"),
        "queue_seconds": ("server.http.light_connections", "_QUEUE_SECONDS", "s"),
        "connections": ("server.http.connection_limit", "MAX_CONNECTIONS", ""),
        "depth": ("server.requests.parse", "MAX_DEPTH", ""),
        "queued": ("server.server_options", "Options.max_queued_requests", ""),
        "queue_wait": ("server.server_options", "Options.max_queue_wait", "s"),
        "timeout": ("server.serving", "MAX_SECONDS", "s"), "outputs": ("server.serving", "MAX_CHOICES", ""),
        "texts": ("server.serving", "MAX_TEXTS", ""), "log_lines": ("server.http.request_log", "MAX_WAITING", ""),
        "open_listed": ("server.admin", "MAX_LISTED", ""), "trace_seconds": ("engine.control_rpc", "MAX_SECONDS", "s"),
        "drain_seconds": ("server.admin", "MAX_DRAIN_SECONDS", "s"),
        "trace_rows": ("engine.control_rpc", "MAX_ROWS", ""),
        "prompts": ("server.requests.request_fields", "MAX_PROMPTS", ""),
        "inputs": ("server.requests.pooling_request", "MAX_INPUTS", ""),
        "pooled_open": ("server.openai.pooled", "MAX_OPEN", ""), "width": ("format.pooling", "MAX_WIDTH", ""),
        "starts": ("server.serving", "_STARTS_PER_ITERATION", ""),
        "template_seconds": ("text.chat_template", "SECONDS", "s"),
        "template_size": ("text.chat_template", "SIZE", "characters"),
        "messages": ("server.requests.request_fields", "MAX_MESSAGES", ""),
        "metadata": ("server.requests.responses_request", "MAX_METADATA", ""),
        "metadata_text": ("server.requests.responses_request", "MAX_METADATA_TEXT", "characters"),
        "included": ("server.requests.responses_request", "MAX_INCLUDE", ""),
        "stored_entries": ("server.stored_responses", "MAX_ENTRIES", ""),
        "conversation": ("server.stored_responses", "MAX_CONVERSATION", "bytes"),
        "items_listed": ("server.responses_routes", "MAX_LISTED", ""),
        "parts": ("server.requests.request_fields", "MAX_PARTS", ""),
        "earlier_calls": ("server.requests.request_fields", "MAX_CALLS", ""),
        "documents": ("server.requests.request_fields", "MAX_DOCUMENTS", ""),
        "template_kwargs": ("server.requests.request_fields", "MAX_TEMPLATE_KWARGS", ""),
        "word": ("server.requests.request_fields", "MAX_NAME", "characters"),
        "salt": ("server.requests.request_fields", "MAX_SALT", "characters"),
        "tools": ("server.requests.request_fields", "MAX_TOOLS", ""),
        "tool_bytes": ("server.tool_calls.definitions", "MAX_BYTES", "bytes"),
        "calls": ("server.tool_calls.definitions", "MAX_CALLS", ""), "n": ("sched.sampling_params", "MAX_N", ""),
        "logprobs": ("format.row_abi", "TOP_LOGPROBS", ""), "stops": ("sched.sampling_params", "MAX_STOP_STRINGS", ""),
        "stop_bytes": ("sched.sampling_params", "MAX_STOP_BYTES", "bytes"), "stop_ids": ("format.row_abi", "STOPS", ""),
        "biases": ("format.row_abi", "BIASES", ""), "allowed": ("sched.sampling_params", "MAX_ALLOWED", ""),
        "bad_words": ("sched.sampling_params", "MAX_BAD_WORDS", ""),
        "made": ("server.tool_calls.response_plan", "_MAX_CHARACTERS", ""),
        "text_threads": ("server.fair_slots", "THREADS", ""),
        "bad_word_bytes": ("sched.sampling_params", "MAX_BAD_WORD_BYTES", "bytes"),
        "form_bytes": ("sched.structured_outputs", "MAX_BYTES", "bytes"),
        "choices": ("sched.structured_outputs", "MAX_CHOICES", ""),
        "grammar_cpu": ("grammar.limits", "COMPILE_CPU_SECONDS", "s"),
        "grammar_memory": ("grammar.limits", "MEMORY_BYTES", "bytes"),
        "grammar_queue": ("grammar.limits", "QUEUE_SECONDS", "s"),
        "grammar_lane": ("grammar.limits", "MAX_TENANT_COMPILATIONS", ""),
        "grammar_slots": ("grammar.limits", "MAX_COMPILATIONS", ""),
        "grammar_workers": ("grammar.limits", "MAX_PROCESSES", ""),
        "grammar_tenant": ("grammar.limits", "MAX_TENANT_PROCESSES", ""),
        "tenant_memory": ("grammar.limits", "TENANT_BYTES", "bytes"),
        "output_cpu": ("grammar.limits", "GUIDE_CPU_SECONDS", "s"),
        "token_cpu": ("grammar.limits", "OPERATION_CPU_SECONDS", "s"),
        "small_body": ("server.requests.parse", "SMALL_BODY", "bytes"),
        "metrics_seconds": ("server.operations.metrics_exporter", "_TEXT_SECONDS", "s"),
        "held": ("server.call", "_TOKEN_BYTES", "bytes"),
        "admitted": ("sched.waiting_queue", "MAX_ADMITTED_TOKENS", ""),
        "update_tokens": ("api.async_request", "MAX_UPDATE_TOKENS", ""),
        "containers": ("server.text_pool.text_messages", "MAX_CONTAINERS", ""),
        "values": ("server.text_pool.text_messages", "MAX_VALUES", ""),
        "fields": ("server.text_pool.text_messages", "MAX_FIELD_BYTES", "bytes"),
        "field_values": ("server.text_pool.text_messages", "MAX_FIELD_VALUES", ""),
        "text_cpu": ("server.text_pool.text_messages", "CPU_SECONDS", "s"),
        "text_memory": ("server.text_pool.text_messages", "MEMORY_BYTES", "bytes"),
        "text_processes": ("server.text_pool.pool", "MAX_PROCESSES", ""),
        "lane_waiting": ("server.fair_slots", "MAX_WAITING", ""),
        "lane_seconds": ("server.fair_slots", "MAX_SECONDS", "s"),
        "bodies": ("server.http.body_budget", "MAX_BYTES", "bytes"),
        "free_body": ("server.http.body_budget", "FREE_BYTES", "bytes"),
        "listed": ("server.prompting", "LIST_TOKENS", ""),
        "answer": ("server.requests.response_size", "MAX_ANSWER", "bytes"),
        "score_weight": ("server.requests.response_size", "SCORE_WEIGHT", ""),
        "skipped": ("server.load_shedding", "MAX_SKIPPED", "bytes"),
        "lines": ("server.http.parser_limits", "MAX_LINES", ""),
        "request_line": ("server.http.parser_limits", "MAX_REQUEST_LINE", "bytes"),
        "query": ("server.http.middleware", "MAX_QUERY", "bytes"),
        "unfinished_heads": ("server.http.parser_limits", "MAX_BYTES", "bytes"),
        "free_head": ("server.http.parser_limits", "FREE_BYTES", "bytes"),
        "hello": ("server.http.tls", "MAX_HANDSHAKE", "bytes"),
        "unparsed": ("server.protocol", "_MAX_UNPARSED", "bytes"),
        "unsent": ("server.http.connection_limit", "MAX_UNSENT", "bytes"),
        "uncounted": ("server.http.connection_limit", "MAX_UNCOUNTED", "bytes"),
        "unsent_kernel": ("server.http.connection_limit", "MAX_UNSENT_KERNEL", "bytes"),
        "request_share": ("server.http.middleware", "SHARE", ""),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One entry of a list: `of` are routes ("GET /health"), or paths of fields ("tools[].function.name")."""

    of: tuple[str, ...]
    cpu: str
    memory: str
    answer: str
    queue: str
    where: tuple[str, ...]


NONE = "–"
_BODY = "its size, {body} (`--max-body-bytes`)"
_FIXED = "a fixed text"
_ADMIN = "only with an admin key"
_COMPARED = "one comparison"

# What holds for every connection and request, whatever the route.
COMMON: tuple[Row, ...] = (
    Row(("a connection",),
        "{read} are read at a time; per iteration of the event loop, accepting connections takes {accept_seconds}, or "
        "{queue_seconds} while more wait, and {handshakes} step of a TLS handshake is taken; a client that sends more "
        "than {tls_overhead} of TLS overhead is disconnected",
        "per connection: {hello} of a TLS handshake, {head} of a head, {body} of a body; the kernel's table of "
        "descriptors has its final size from the start",
        "unsent data: {unsent} for all clients together, not counting {uncounted} of each, and {unsent_kernel} of "
        "each in the kernel; a client that reads nothing for {write_seconds} is disconnected",
        "{connections} connections (`--max-connections`), idle ones for 15 s (`--timeout-keep-alive`) or until a new "
        "one takes their place; {handshake_seconds} for a TLS handshake; if there are several keys, each has at most "
        "{request_share} times as many open requests as there are connections left for others",
        ("server.protocol", "server.http.connection_limit", "server.http.light_connections",
         "server.http.fair_selector", "server.http.event_loop", "server.http.tls", "server.http.middleware")),
    Row(("the head of a request",), "{header_count} headers, {lines} lines, matched in linear time",
        "{headers}; {unfinished_heads} for all unfinished heads over {free_head}", "400, 408, 431 or 503",
        "{head_seconds} to arrive; at most {heads} are parsed per iteration of the event loop, fewer if iterations are "
        "long, and keys take turns",
        ("server.protocol", "server.http.auth", "server.http.read_turns", "server.http.parser_limits")),
    Row(("the request target",), "decoded once; fields of a query if the route has any",
        "{request_line} of the request's line, {query} of a query",
        "414 if it is too long; 400 unless it is a path, or an absolute URL of this server", NONE,
        ("server.http.parser_limits", "server.http.middleware", "server.http.auth")),
    Row(("the headers Authorization, X-Api-Key",), "a digest, looked up among those of all keys", "the head's limit",
        "401 or 403; 400 for two values", NONE, ("server.http.auth",)),
    Row(("the headers Host, Content-Type, Content-Length, Content-Encoding",), _COMPARED, "the head's limit",
        "400, 413, 415 or 421", NONE, ("server.http.auth",)),
    Row(("the line before a chunk, the trailers of a body",), "{unparsed} at a time, matched in linear time",
        "{unparsed}", "431", NONE,
        ("server.protocol", "server.http.parser_limits")),
    Row(("a body",),
        "of bodies over {short_body}, one is parsed per iteration of the event loop; those over {small_body} are "
        "parsed in "
        "a text process, with {text_cpu} of CPU time; {containers} objects and lists, {values} values, nesting of "
        "{depth} levels",
        _BODY + "; {text_memory} for a text process; {bodies} for all unfinished bodies over {free_body}, which keys "
        "share",
        "400, 408, 413 or 503", "{body_seconds} to arrive; {text_processes} text processes, in which keys take turns: "
        "{lane_waiting} jobs wait, up to {lane_seconds} each",
        ("server.http.auth", "server.http.body_budget", "server.fair_slots", "server.requests.parse",
        "server.text_pool.pool",
         "server.text_pool.text_worker")),
    Row(("all fields but the prompt",), "decoded once more in the event loop",
        "{fields} of JSON with {field_values} values", "400", NONE,
        ("server.text_pool.jobs",)),
    Row(("an unknown field",), "its name is looked up after decoding", "the body's limit",
        "none: it is counted", NONE, ("server.requests.parse",)),
    Row(("the queue",), "refused from the head, before the body is read; {skipped} of a refused body are dropped",
        "{queued} sequences wait (`--max-num-queued-reqs`), and their tokens (`--max-num-queued-tokens`)",
        "503 with Retry-After",
        "{queue_wait} of estimated wait (`--max-queue-wait`); a share for each key, `--max-num-reqs-per-key`",
        ("server.operations.admission", "server.load_shedding")),
    Row(("the log",), "a line per request, written by a thread", "{log_lines} waiting lines; further ones are dropped",
        NONE, NONE, ("server.http.request_log",)),
)  # fmt: skip

_ANSWERED = (
    "{answer} (`--max-answer-bytes`), estimated before the start; encoded and sent in pieces, of which keys take turns"
)
ROUTES: tuple[Row, ...] = (
    Row(("POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages"),
        "prompt and output tokens, which the scheduler shares among keys", "the KV cache of the admitted sequences",
        _ANSWERED,
        "the queue's limits; {outputs} outputs; a place in the queue is held until the outputs are generated, however "
        "slowly the client reads them",
        ("server.serving", "server.operations.admission", "server.requests.response_size", "server.http.lazy_json",
        "sched.scheduler")),
    Row(("POST /v1/embeddings", "POST /v1/score", "POST /score", "POST /v1/rerank", "POST /rerank", "POST /v2/rerank",
         "POST /classify"),
        "the tokens of all prompts, which the scheduler shares among keys; a text that belongs to many pairs is "
        "tokenized in a text process; scores are computed in steps of 1 ms",
        "the KV cache of the admitted sequences; 4 bytes per number, also for embeddings from which scores are "
        "computed",
        _ANSWERED, "the queue's limits on tokens; {pooled_open} prompts of a request wait or run at a time; {starts} "
        "start in an iteration of the event loop, in which keys take turns",
        ("server.openai.pooled", "server.pooled_prompts", "server.operations.admission",
         "sched.scheduler")),
    Row(("GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}",
         "GET /v1/responses/{response_id}/input_items"), "the ids of items are read, nothing else is decoded",
        "`--response-store-bytes` (none) and {stored_entries} responses in all, half of them for a key if there are "
        "several; others are dropped", "a stored response, or {items_listed} items, sent in parts",
        "429 or 503 if open responses have too many bytes", ("server.stored_responses", "server.responses_routes",
        "server.operations.admission", "server.http.replies")),
    Row(("POST /tokenize", "POST /detokenize", "POST /v1/messages/count_tokens", "POST /v1/responses/input_tokens"),
        "{listed} tokens, or as many as the context has; over {small_body} in a text process",
        _BODY, "an id, and a text, for each token, sent in parts",
        "{texts} at a time of one key, then 503; keys take turns; 429 or 503 if open responses have too many bytes",
        ("server.serving", "server.prompting", "server.fair_slots", "server.text_pool.pool",
        "server.operations.admission")),
    Row(("GET /v1/models", "GET /v1/models/{name}"), "the number of served names", NONE, "an entry for each name", NONE,
        ("server.app",)),
    Row(("GET /tokenizer_info", "GET /version", "GET /server_info", "GET /get_server_info", "GET /model_info",
         "GET /get_model_info", "GET /load", "GET /get_load", "GET /openapi.json", "GET /"),
        _FIXED, NONE, _FIXED, NONE, ("server.app", "server.page")),
    Row(("GET /health", "GET /ping", "GET /ready"),
        "answered from the head, without parser and middleware, if it is plain; never logged above debug", NONE,
        "a status without a body, made every {probe_seconds}",
        "up to {probes} connections of probes in an iteration of the event loop, before all others",
        ("server.load_shedding", "server.http.light_connections", "server.http.fair_selector", "server.app")),
    Row(("GET /metrics",), "the number of metrics, which requests cannot change; made in steps of 1 ms", NONE,
        "a line for each", "one at a time, at most every {metrics_seconds}, shared by the requests that wait for it",
        ("server.operations.metrics_exporter",)),
    Row(("GET /admin/state",), _ADMIN, NONE, "{open_listed} requests", NONE, ("server.admin",)),
    Row(("GET /admin/trace",), _ADMIN, "{trace_rows} spans", "the same", "one at a time, {trace_seconds}",
        ("server.admin", "engine.control_rpc")),
    Row(("POST /admin/restart",), _ADMIN, _BODY, "a number for each engine",
        "one at a time, {drain_seconds} for open requests of each engine", ("server.admin",)),
    Row(("POST /admin/abort", "POST /admin/reset_prefix_cache", "POST /admin/log_level"), _ADMIN, _BODY, "one number",
        NONE, ("server.admin",)),
)  # fmt: skip

FIELDS: tuple[Row, ...] = (
    Row(("header X-Request-Id", "path name"), "one match of 128 characters, or one comparison", "the head's limit",
        "repeated if it is valid", NONE, ("server.http.auth", "server.serving")),
    Row(("header X-Request-Timeout", "query seconds"), "a number of at most 20 digits", NONE,
        "504 after that time", "at most {timeout}, and `--request-timeout`; {trace_seconds} for a trace",
        ("server.http.middleware", "server.serving", "server.admin")),
    Row(("model", "id", "level"), _COMPARED, "{word} for a model", "404 or 400", NONE,
        ("server.requests.request_fields", "server.serving")),
    Row(("prompt",), "rejected by its length if it cannot fit; else tokenized in growing parts, up "
        "to the model's length", "{prompts} prompts; the body's limit",
        "`echo` repeats it", "counted as tokens, see the queue",
        ("server.prompting", "text.bounded_encode", "server.serving")),
    Row(("tokens",), "{listed}, or as many as the context has", "the body's limit", "the text of the ids",
        "{texts} at a time of one key",
        ("server.prompting", "server.serving")),
    Row(("messages", "input", "instructions", "system"),
        "rendered in a thread for up to {template_seconds}, at the same time as those of other keys; {parts} parts, "
        "{earlier_calls} earlier calls",
        "{messages} messages; {template_size} of rendered text; for a model that pools, {inputs} inputs", NONE,
        "the resulting prompt",
        ("server.requests.request_fields", "server.prompting", "server.tool_calls.history", "text.chat_template")),
    Row(("text_1", "text_2", "query"),
        "rejected by their length if they cannot fit; else tokenized, once for each pair of a cross-encoder",
        "{inputs} texts; the body's limit", "`rerank` repeats the documents, whose memory is reserved",
        "counted as tokens, see the queue",
        ("server.requests.pooling_request", "server.pooled_prompts", "server.prompting")),
    Row(("encoding_format", "dimensions", "use_activation", "normalize", "top_n", "return_documents"),
        "a few comparisons", NONE, "at most {width} numbers, {inputs} documents", NONE,
        ("server.requests.pooling_request", "pooling_params", "server.openai.pooled")),
    Row(("previous_response_id", "path response_id"), "a look-up for each response of the chain",
        "{conversation} of earlier items, copied only for a text process (over {small_body}); {messages} with those of "
        "the request",
        NONE, "the resulting prompt", ("server.stored_responses", "server.requests.responses_request",
        "server.responses_routes")),
    Row(("store", "metadata", "include", "query limit", "query order", "query after", "query stream"),
        "a few comparisons; the ids of an input are decoded once",
        "{metadata} entries of {metadata_text}; {included} names",
        "`metadata` and the options are repeated in the response", "503 if there is no room for another response",
        ("server.stored_responses", "server.requests.responses_request", "server.responses_routes")),
    Row(("truncation", "text", "text.verbosity", "reasoning", "reasoning.summary", "reasoning.generate_summary",
         "stream_options.include_obfuscation", "context_management", "context_management.edits", "thinking",
         "thinking.type", "thinking.budget_tokens", "thinking.display", "output_config", "output_config.task_budget"),
        "a few comparisons", "{word} each, {tools} edits", NONE, NONE,
        ("server.requests.responses_request", "server.requests.messages_request")),
    Row(("documents", "documents[].text", "chat_template_kwargs", "reasoning_effort", "reasoning.effort",
         "output_config.effort"),
        "like messages, within the template's time",
        "{documents} documents ({inputs} to rerank), {template_kwargs} variables, {word}", NONE, "the resulting prompt",
        ("server.requests.request_fields", "text.chat_template")),
    Row(("tools", "tools[].type", "tools[].function", "tools[].function.name", "tools[].function.description",
         "tools[].function.parameters", "tools[].function.parameters.type", "tools[].function.strict", "tools[].name",
         "tools[].description", "tools[].parameters", "tools[].parameters.type", "tools[].strict",
         "tools[].input_schema", "tools[].input_schema.type"),
        "their size is checked first; for an enforced or strict call, one of {text_threads} threads generates a "
        "grammar of "
        "at most {made} characters (including its parts), which is compiled like response_format",
        "{tools} tools, {tool_bytes} together", "{calls} calls if they are enforced", "the resulting prompt",
        ("server.requests.request_fields", "server.tool_calls.definitions", "server.tool_calls.response_plan",
        "server.tool_calls.response_plan")),
    Row(("tool_choice", "tool_choice.allowed_tools", "tool_choice.allowed_tools.tools", "tool_choice.tools",
         "tool_choice.type", "tool_choice.name", "tool_choice.disable_parallel_tool_use", "parallel_tool_calls"),
        "{tools} names", NONE, "{calls} calls if they are enforced", NONE,
        ("server.requests.request_fields", "server.tool_calls.definitions")),
    Row(("response_format", "response_format.type", "response_format.json_schema",
         "response_format.json_schema.name", "response_format.json_schema.description",
         "response_format.json_schema.schema", "response_format.json_schema.strict", "response_format.schema",
         "response_format.format", "response_format.structures", "response_format.triggers",
         "text.format", "text.format.type", "text.format.name", "text.format.description", "text.format.schema",
         "text.format.strict", "output_format", "output_format.type", "output_format.schema", "output_config.format",
         "output_config.format.type", "output_config.format.schema"),
        "its size is checked before its contents; CPU time: {grammar_cpu} to compile it, {output_cpu} plus 20 ms "
        "per token "
        "for an output, {token_cpu} for a single token",
        "{form_bytes}; {grammar_memory} per grammar process, {tenant_memory} for all of a key",
        "at most one character of white space between parts",
        "{grammar_slots} compilations at a time, {grammar_lane} of one key, {grammar_workers} processes, "
        "{grammar_tenant} of one key; 503 after {grammar_queue}",
        ("server.requests.sampling_fields", "sched.structured_outputs", "grammar.limits", "grammar.grammar_worker",
        "grammar.worker_pool", "grammar.client", "sched.guided_requests")),
    Row(("structured_outputs", "structured_outputs.json", "structured_outputs.regex", "structured_outputs.choice",
         "structured_outputs.grammar", "structured_outputs.json_object", "structured_outputs.structural_tag",
         "structured_outputs.disable_any_whitespace",
         "structured_outputs.disable_additional_properties", "structured_outputs.whitespace_pattern", "guided_json",
         "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
        "like response_format", "{form_bytes}; {choices} choices", "what the grammar allows, at most `max_tokens`",
        "like response_format", ("server.requests.request_fields", "sched.structured_outputs", "grammar.limits")),
    Row(("n", "best_of"), "each output is a sequence of its own; a step admits sequences of {admitted} tokens, "
        "cached ones included, and at least one", "KV cache of each output; that of the prompt is "
        "shared",
        "{n} outputs, {outputs} with all prompts", "each output is a sequence in the queue",
        ("sched.sampling_params", "server.serving", "server.operations.admission")),
    Row(("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"),
        "the model's length", "KV cache of that many tokens",
        "that many tokens per output", "counted for admission before the start",
        ("sched.request_init", "sched.sampling_params", "sched.scheduler_config",
        "server.operations.admission")),
    Row(("logprobs", "top_logprobs", "prompt_logprobs"), "{logprobs} alternatives per token",
        "packed: 12 bytes per alternative", "the route's limit",
        "a scored prompt token counts as {score_weight} tokens; responses of all requests share a budget of bytes",
        ("sched.sampling_params", "sched.packed_logprobs", "server.requests.response_size",
        "server.operations.admission")),
    Row(("echo", "return_token_ids", "return_tokens_as_token_ids", "return_token_strs"), "one conversion per "
        "token", NONE,
        "the prompt and its ids once more for each output", NONE, ("server.openai.completions", "server.app")),
    Row(("stop", "stop_sequences", "include_stop_str_in_output"),
        "a search of {stop_bytes} around each new token for each string",
        "{stops} strings of {stop_bytes}", "ends the output", NONE,
        ("server.requests.request_fields", "sched.sampling_params", "text.output_text")),
    Row(("stop_token_ids", "ignore_eos", "skip_special_tokens"), "set look-ups", "{stop_ids} ids", "ends the "
        "output", NONE,
        ("server.requests.request_fields", "sched.sampling_params")),
    Row(("logit_bias",), "added on the device", "{biases} ids", NONE, NONE,
    ("server.requests.request_fields", "sched.sampling_params")),
    Row(("allowed_token_ids",), "one mask for all outputs, made by the front end",
        "{allowed} ids; one bit per id of the vocabulary", NONE, NONE,
        ("server.requests.request_fields", "engine.input_processor", "sched.token_guide")),
    Row(("bad_words",), "tokenized once per request, in one of {text_threads} threads that keys use in turn; "
        "bytes are compared after each token",
        "{bad_words} words, {bad_word_bytes} together", NONE, NONE,
        ("server.requests.request_fields", "sched.sampling_params", "sched.token_guide")),
    Row(("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
         "seed"), "numbers in ranges, applied on the device", NONE, NONE, NONE, ("sched.sampling_params",)),
    Row(("stream", "stream_options", "stream_options.include_usage", "stream_options.continuous_usage_stats"),
        "at most one event for each token and output; slow readers get fewer, larger ones, and {update_tokens} tokens "
        "in an iteration of the event loop; the text is parsed as it arrives",
        "one state per output, {held} per token; for a slow client, they count as unsent data once all tokens are "
        "generated",
        "about 200 bytes per event in addition to the text", NONE,
        ("server.http.replies", "engine.output_processor", "api.async_request", "server.tool_calls.message")),
    Row(("truncate_prompt_tokens", "truncation_side"),
        "the whole prompt is tokenized, at most {listed} tokens, or as many as the context has", "the body's limit",
        NONE, "the kept tokens are counted", ("server.requests.sampling_fields", "server.prompting")),
    Row(("priority", "cache_salt", "service_tier"), "`priority`: a comparison; `cache_salt`: a hash per page; "
        "`service_tier`: nothing", "{salt}", NONE,
        "with `--scheduling-policy priority`, a priority orders only the requests of its key",
        ("server.requests.request_fields", "server.serving")),
    Row(("add_special_tokens", "add_generation_prompt", "continue_final_message", "include_reasoning"), "flags", NONE,
        NONE, NONE, ("server.requests.request_fields",)),
)  # fmt: skip
