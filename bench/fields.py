"""Cost of the most expensive valid value of each request field: `python -m bench.fields [--model MODEL.llmc]`.

For each case two times in milliseconds, each the fastest of several runs: on the front's event loop (from the decoded
JSON to the message for the engine, without tokenizing prompts) and on the engine's thread (from that message to
requests in the queue). What runs in threads or in other processes does not count.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
from llmc_runtime.api.async_llm import AsyncLLM
from llmc_runtime.defaults import default_params
from llmc_runtime.engine.input_processor import bad_word_ids, params_of_output, prepare
from llmc_runtime.engine.messages import Add, Ready, add_message, params_of
from llmc_runtime.engine.output_processor import OutputProcessor
from llmc_runtime.format.row_abi import BIASES, STOPS
from llmc_runtime.outputs import RequestState
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.request_init import init_request
from llmc_runtime.sched.sampling_params import MAX_ALLOWED, MAX_BAD_WORDS, MAX_STOP_BYTES, MAX_STOP_STRINGS
from llmc_runtime.sched.scheduler_config import SchedulerConfig
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.parse import document, parse
from llmc_runtime.server.requests.request_fields import ChatRequest, CompletionRequest
from llmc_runtime.server.requests.sampling_fields import of_chat, of_completion
from llmc_runtime.server.tool_calls.parser_select import select_formats
from llmc_runtime.server.tool_calls.response_plan import plan_of
from llmc_runtime.text.tokenizer import Tokenizer

VOCAB = 151_936
CONFIG = SchedulerConfig(65_536, 16, 32_768, 256, 8192, VOCAB, eos_token_ids=(2,))


class Defaults(AsyncLLM):
    """An AsyncLLM that has only sampling defaults."""

    def __init__(self) -> None:
        self.generation = {}

    @property
    def config(self) -> Any:
        """The engine's limits."""
        return Ready(32_768, 256, 8192, 65_536, 16, VOCAB, "")

    def get_default_sampling_params(self, *, max_tokens: int | None = 16) -> Any:
        return default_params({}, max_tokens=max_tokens)


def wide(count: int) -> dict[str, Any]:
    """Return a schema with that many properties."""
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}


def schema_format(schema: Any) -> dict[str, Any]:
    """Return the response_format for a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}}


def tool(name: str, schema: Any) -> dict[str, Any]:
    """Return a tool definition."""
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def cases() -> dict[str, dict[str, Any]]:
    """Return requests by the name of the case, each with a field at its limit, some beyond it."""
    texts = ["x" * (MAX_STOP_BYTES - 4) + f"{i:04}" for i in range(MAX_BAD_WORDS)]
    ids = list(range(MAX_ALLOWED))
    tools = [tool(f"f{i}", wide(30)) for i in range(128)]
    return {
        "nothing": {},
        "n 64": {"n": 64},
        "n 64, allowed_token_ids 65,536": {"n": 64, "allowed_token_ids": ids},
        "allowed_token_ids 65,536": {"allowed_token_ids": ids},
        "allowed_token_ids 65,536 with min_tokens": {"allowed_token_ids": ids, "min_tokens": 5},
        "allowed_token_ids 1,000,000 (refused)": {"allowed_token_ids": list(range(1_000_000))},
        "bad_words 128 x 128 bytes": {"bad_words": [text[-128:] for text in texts]},
        "bad_words 128 x 1,024 bytes (refused)": {"bad_words": texts},
        "bad_words 1,000,000 (refused)": {"bad_words": ["x"] * 1_000_000},
        "stop 16 x 1,024 bytes": {"stop": texts[:MAX_STOP_STRINGS]},
        "stop 1,000,000 (refused)": {"stop": ["x"] * 1_000_000},
        "stop one of 8 MB (refused)": {"stop": "x" * 8_000_000},
        "logit_bias 1,024": {"logit_bias": {str(i): 1.5 for i in range(BIASES)}},
        "logit_bias 400,000 (refused)": {"logit_bias": {str(i): 1.5 for i in range(400_000)}},
        "stop_token_ids 32": {"stop_token_ids": list(range(STOPS))},
        "stop_token_ids 1,000,000 (refused)": {"stop_token_ids": list(range(1_000_000))},
        "json_schema 60 KiB": schema_format(wide(2000)),
        "json_schema 6 MB (refused)": schema_format(wide(200_000)),
        "structured_outputs.json 6 MB text (refused)": {"structured_outputs": {"json": json.dumps(wide(200_000))}},
        "structured_outputs.choice 1,024": {"structured_outputs": {"choice": [f"choice {i:040}" for i in range(1024)]}},
        "structured_outputs.choice 500,000 (refused)": {"structured_outputs": {"choice": ["x"] * 500_000}},
        "structured_outputs.regex 64 KiB": {"structured_outputs": {"regex": "a" * 65_000}},
        "metadata 6 MB": {"metadata": wide(200_000)},
        "messages 4,096": {"messages": [{"role": "user", "content": "x"}] * 4096},
        "messages 100,000 (refused)": {"messages": [{"role": "user", "content": "x"}] * 100_000},
        "tools 128, 200 KB": {"tools": tools},
        "tools 128, required": {"tools": tools[:60], "tool_choice": "required"},
        "tools 20,000 (refused)": {"tools": [tool(f"f{i}", {}) for i in range(20_000)]},
        "tools 6 MB (refused)": {"tools": [tool("f", wide(200_000))]},
        "chat_template_kwargs 100,000": {"chat_template_kwargs": {f"v{i}": i for i in range(100_000)}},
        "documents 6 MB": {"documents": [wide(200_000)]},
        "cache_salt 8 MB (refused)": {"cache_salt": "x" * 8_000_000},
    }  # fmt: skip


def fastest(work: Callable[[], Any], times: int = 5) -> tuple[float, Any]:
    """Return the milliseconds of the fastest of several runs, and the result of the last one."""
    best, out = float("inf"), None
    for _ in range(times):
        began = time.thread_time()
        out = work()
        best = min(best, time.thread_time() - began)
    return 1000 * best, out


class Front:
    """The front end's work for one request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.llm, self.formats = (
            tokenizer,
            Defaults(),
            select_formats(tokenizer, None, "hermes", "none"),
        )

    @functools.lru_cache  # noqa: B019  (longer ones are tokenized in a thread, and so left out of the time)
    def words(self, words: tuple[str, ...]) -> list[list[int]]:
        """Return the bad words as token ids."""
        return bad_word_ids(self.tokenizer, words)

    def message(self, body: bytes, chat: bool) -> bytes | str:
        """Return the message for the engine, or the error's text if the request is refused."""
        try:
            if chat:
                request = parse(body, ChatRequest, lambda n: None)
                params, _ = of_chat(request, self.llm), plan_of(request, self.formats)
            else:
                completion = parse(body, CompletionRequest, lambda n: None)
                params = of_completion(completion, self.llm)
        except ApiError as e:
            return e.message
        words = self.words(tuple(params.bad_words or ()))
        prompt = Prompt([1, 2, 3], "abc")
        request = prepare(prompt, params, words, self.llm.config.vocab_size)
        state = RequestState("x", prompt.text, prompt.ids, request.params, self.tokenizer)
        OutputProcessor(lambda ids: None).add(request, state)
        return msgspec.msgpack.encode(add_message(request))


def engine(message: bytes) -> list[Request]:
    """The engine's work for it."""
    add = msgspec.msgpack.decode(message, type=Add)
    params = params_of(add.params)
    requests: list[Request] = []
    for i in range(params.n):
        own_params = params_of_output(params, i)
        request = Request(str(i), add.prompt, own_params, 0, "", add.bad_words, None, requests[0] if requests else None)
        init_request(request, CONFIG, 1)
        requests.append(request)
    return requests


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--model", default="build/demo.llmc", help="artifact whose tokenizer is used (build/demo.llmc)")
    front = Front(Tokenizer.open(f"{parser.parse_args().model}/tokenizer"))
    print(f"{'case':50} {'decode':>8} {'front':>8} {'engine':>8}  ms")
    for name, fields in cases().items():
        chat = bool(fields.keys() & {"messages", "tools", "documents", "chat_template_kwargs"})
        base: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": [1, 2, 3]}
        body = json.dumps({**base, "max_tokens": 16, "temperature": 1, **fields}).encode()
        decode, _ = fastest(lambda body=body: document(body), 5)  # type: ignore[misc]
        whole, message = fastest(lambda body=body, chat=chat: front.message(body, chat), 5)  # type: ignore[misc]
        worked = fastest(lambda message=message: engine(message))[0] if isinstance(message, bytes) else 0.0  # type: ignore[misc]
        cause = "" if isinstance(message, bytes) else message[:60]
        print(f"{name:50} {decode:8.2f} {max(0.0, whole - decode):8.2f} {worked:8.2f}  {cause}", flush=True)


if __name__ == "__main__":
    main()
