"""The server over the simulated device: what real clients get is what LLM gives in process, whole and streamed."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from llmc_runtime import LLM, SamplingParams, StructuredOutputsParams
from llmc_runtime.outputs import CompletionOutput

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")
import httpx  # noqa: E402
from llmc_runtime.server.http.errors import ApiError  # noqa: E402
from llmc_runtime.server.requests.parse import parse  # noqa: E402
from llmc_runtime.server.requests.request_fields import ChatRequest  # noqa: E402
from llmc_runtime.server.requests.sampling_fields import WHITESPACE as SPACE  # noqa: E402
from llmc_runtime.server.requests.sampling_fields import of_chat  # noqa: E402

from tests.runtime.fake_core import LENGTH, VOCAB  # noqa: E402
from tests.runtime.served import TOK, Served, in_process, served  # noqa: E402

WORDS = ("The kernel", "a matrix of", "x", "Once upon", "fused, then", "9 times")
CHAT = [{"role": "user", "content": "What is a river?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as one:
        yield one
        stats = one.rest()
        assert stats["kv_cache_usage_perc"] == 0 and not stats["num_requests_open"]


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The same model in process."""
    return in_process()


def post(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def direct(llm: LLM, prompt: Any, **params: Any) -> list[CompletionOutput]:
    return llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def controls(draw: random.Random) -> dict[str, Any]:
    """Sampling fields, drawn; each is spelled as SamplingParams has it."""
    fields: dict[str, Any] = {
        "temperature": draw.choice([0.3, 1.0, 1.7]), "top_p": draw.choice([0.5, 0.95, 1.0]),
        "top_k": draw.choice([0, 3, 40]), "min_p": draw.choice([0.0, 0.05]), "seed": draw.randrange(1 << 40),
        "repetition_penalty": draw.choice([1.0, 1.2]), "presence_penalty": draw.choice([0.0, 0.5]),
        "frequency_penalty": draw.choice([0.0, -0.5]), "max_tokens": draw.randrange(3, 40),
        "min_tokens": draw.choice([0, 2]), "stop": draw.choice([[], ["e"], [" t", "ab"]]),
        "ignore_eos": draw.random() < 0.5, "include_stop_str_in_output": draw.random() < 0.5,
        "skip_special_tokens": draw.random() < 0.5, "n": draw.choice([1, 1, 3]),
        "stop_token_ids": [draw.randrange(VOCAB) for _ in range(2)],
        "logit_bias": draw.choice([None, {str(draw.randrange(VOCAB)): 5}]),
        "allowed_token_ids": draw.choice([None, draw.sample(range(VOCAB), 60)]),
        "bad_words": draw.choice([[], ["the", "x y"]]),
    }  # fmt: skip
    return fields


@pytest.mark.parametrize("seed", range(6))
def test_every_control_gives_what_it_gives_in_process(http: httpx.Client, llm: LLM, seed: int) -> None:
    draw = random.Random(seed)
    fields, prompt = controls(draw), draw.choice(WORDS)
    want = direct(llm, prompt, **fields)
    got = post(http, prompt=prompt, **fields)
    assert [c["text"] for c in got["choices"]] == [one.text for one in want]
    assert [c["finish_reason"] for c in got["choices"]] == [one.finish_reason for one in want]
    assert [c["stop_reason"] for c in got["choices"]] == [one.stop_reason for one in want]
    assert got["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in want)
    chunks = events(http.post("/v1/completions", json={"prompt": prompt, "stream": True, **fields}).text)
    texts = [""] * len(want)
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [one.text for one in want]
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == sorted(one.finish_reason or "" for one in want)


def test_prompts_of_every_form_and_many_at_once(http: httpx.Client, llm: LLM) -> None:
    ids = [[5, 6, 7], [9, 8], list(range(40, 60))]
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 9, "ignore_eos": True, "seed": 7}
    for given in ("x", [*WORDS], ids[0], ids):
        prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        want = [direct(llm, one, **params)[0].text for one in prompts]
        got = post(http, prompt=given, **params)
        assert [c["text"] for c in got["choices"]] == want
        assert [c["index"] for c in got["choices"]] == list(range(len(want)))
    got = post(http, prompt=ids, n=2, max_tokens=4, seed=3)
    want = [one.text for prompt in ids for one in direct(llm, prompt, n=2, max_tokens=4, seed=3)]
    assert [c["text"] for c in got["choices"]] == want


def test_echo_and_log_probabilities_as_evaluations_read_them(http: httpx.Client, llm: LLM) -> None:
    ids = [11, 99, 35, 72, 44]
    body: dict[str, Any] = {"temperature": 0, "seed": 1, "max_tokens": 1, "logprobs": 1}
    (choice,) = post(http, prompt=[ids], echo=True, **body)["choices"]
    whole = llm.generate(
        [ids], SamplingParams(temperature=0, seed=1, max_tokens=1, logprobs=1, prompt_logprobs=1), False
    )[0]
    scores = [None, *(row[t].logprob for t, row in zip(ids[1:], (whole.prompt_logprobs or [])[1:]) if row)]
    (out,) = whole.outputs
    assert choice["logprobs"]["token_logprobs"] == [*scores, (out.logprobs or [])[0][out.token_ids[0]].logprob]
    assert choice["logprobs"]["tokens"] == [TOK.token_text(t) for t in [*ids, *out.token_ids]]
    assert choice["logprobs"]["top_logprobs"][0] is None and all(choice["logprobs"]["top_logprobs"][1:])
    assert choice["text"] == TOK.decode(ids, skip_special_tokens=False) + out.text
    offsets = choice["logprobs"]["text_offset"]
    assert all(b - a == len(t) for a, b, t in zip(offsets, offsets[1:], choice["logprobs"]["tokens"]))
    (scored,) = post(http, prompt=[ids], echo=True, **{**body, "max_tokens": 0})["choices"]
    assert scored["logprobs"]["token_logprobs"] == scores and scored["finish_reason"] == "length"
    (piece, *_) = events(http.post("/v1/completions", json={"prompt": ids, "echo": True, "stream": True, **body}).text)
    assert piece["choices"][0]["logprobs"]["tokens"][: len(ids)] == [TOK.token_text(t) for t in ids]
    logprobs = post(http, prompt=ids, prompt_logprobs=0, max_tokens=1, temperature=0)["choices"][0]["prompt_logprobs"]
    assert logprobs[0] is None and [list(row) for row in logprobs[1:]] == [[str(t)] for t in ids[1:]]


def test_openai_completions_and_usage(client: Any, llm: LLM) -> None:
    want = direct(llm, "The kernel", temperature=0, max_tokens=12, seed=7)[0]
    got = client.completions.create(model="toy", prompt="The kernel", temperature=0, max_tokens=12, seed=7)
    assert got.choices[0].text == want.text and got.model == "toy" and got.id.startswith("cmpl-")
    assert got.usage.prompt_tokens == len(TOK.encode("The kernel"))
    stream = client.completions.create(
        model="other", prompt="The kernel", temperature=0, max_tokens=12, seed=7, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == want.text
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(want.token_ids)
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_openai_chat_whole_and_streamed(client: Any, llm: LLM) -> None:
    want = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=15, logprobs=2, seed=7), use_tqdm=False)[0].outputs[
        0
    ]
    options: dict[str, Any] = {
        "model": "toy",
        "messages": CHAT,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "seed": 7,
    }
    got = client.chat.completions.create(**options, max_completion_tokens=15)
    assert got.choices[0].message.content == want.text and got.choices[0].message.role == "assistant"
    logprobs = got.choices[0].logprobs.content
    rows = want.logprobs or []
    assert [t.logprob for t in logprobs] == [row[i].logprob for i, row in zip(want.token_ids, rows)]
    assert [[o.logprob for o in t.top_logprobs] for t in logprobs] == [
        [one.logprob for one in sorted(row.values(), key=lambda one: one.rank) if one.rank <= 2] for row in rows
    ]
    chunks = list(client.chat.completions.create(**options, max_tokens=15, n=1, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == want.text
    assert chunks[-1].choices[0].finish_reason == want.finish_reason
    tokens = [t.logprob for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert tokens == [t.logprob for t in logprobs]


def test_openai_async_many_streams_at_once(server: Served, llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "seed": 7}

    async def one(client: Any, text: str) -> str:
        messages = [{"role": "user", "content": text}]
        stream = await client.chat.completions.create(model="toy", messages=messages, stream=True, **params)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def all_of(texts: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(one(client, text) for text in texts)))

    texts = [f"{word} {i}" for i in range(4) for word in WORDS]
    requests = [[{"role": "user", "content": text}] for text in texts]
    want = [out.outputs[0].text for out in llm.chat(requests, SamplingParams(**params), use_tqdm=False)]
    assert asyncio.run(all_of(texts)) == want


def test_structured_outputs_in_every_spelling(server: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    wanted = StructuredOutputsParams(json=schema)
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, "strict": True}}
    spelled: tuple[tuple[dict[str, Any], Any], ...] = (
        ({"response_format": form}, replace(wanted, whitespace_pattern=SPACE, disable_additional_properties=True)),
        ({"structured_outputs": {"json": schema}}, wanted),
        (
            {"response_format": {"type": "json_object"}},
            StructuredOutputsParams(json_object=True, whitespace_pattern=SPACE),
        ),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, StructuredOutputsParams(regex="[a-c]{3}")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputsParams(grammar='start: "a"')),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object", "schema": schema}}, replace(wanted, whitespace_pattern=SPACE)),
        ({"guided_json": schema, "guided_whitespace_pattern": SPACE}, replace(wanted, whitespace_pattern=SPACE)),
        ({"guided_json": json.dumps(schema)}, replace(wanted, json=json.dumps(schema))),
        ({"guided_regex": "[a-c]{3}"}, StructuredOutputsParams(regex="[a-c]{3}")),
        ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=("a", "b"))),
        ({"guided_grammar": 'start: "a"', "guided_json": None}, StructuredOutputsParams(grammar='start: "a"')),
    )
    for fields, want in spelled:
        request = parse(json.dumps({"messages": CHAT, **fields}).encode(), ChatRequest, lambda fields: None)
        assert of_chat(request, server.llm).structured_outputs == want
    for fields in ({"structured_outputs": {}}, {"structured_outputs": {"regex": "a", "choice": ["b"]}}):
        with pytest.raises(ApiError, match="structured_outputs"):
            of_chat(parse(json.dumps({"messages": CHAT, **fields}).encode(), ChatRequest, id), server.llm)


def test_models_health_version_and_tokens(client: Any, http: httpx.Client) -> None:
    assert [m.id for m in client.models.list()] == ["toy", "other"]
    assert client.models.retrieve("other").id == "other"
    assert all(http.get(path).status_code == 200 for path in ("/health", "/ready", "/ping"))
    assert http.get("/load").json() == {"server_load": 0}
    assert http.get("/version").json().keys() == {"version"}
    ids = TOK.encode("The kernel")
    response = post(http, "/tokenize", prompt="The kernel", return_token_strs=True)
    assert response == {
        "count": len(ids), "max_model_len": LENGTH, "tokens": ids, "token_strs": [TOK.token(i) for i in ids]
    }  # fmt: skip
    assert post(http, "/tokenize", prompt="The kernel", add_special_tokens=False)["tokens"] == ids[1:]
    assert post(http, "/tokenize", messages=CHAT)["count"] > len(CHAT)
    assert post(http, "/detokenize", tokens=ids[1:])["prompt"] == "The kernel"
    with pytest.raises(openai.BadRequestError, match="generates text") as refused:
        client.embeddings.create(model="toy", input="x")
    assert refused.value.code == "unsupported_task"


BAD: tuple[tuple[dict[str, Any], int, str | None, str], ...] = (
    ({}, 400, "prompt", "invalid_type"),
    ({"prompt": ""}, 200, None, ""),
    ({"prompt": []}, 400, "prompt", "invalid_value"),
    ({"prompt": [[]]}, 400, "prompt", "invalid_value"),
    ({"prompt": ["x", 1]}, 400, "prompt", "invalid_value"),
    ({"prompt": ["x"] * 129}, 400, "prompt", "invalid_value"),
    ({"prompt": [10**6]}, 400, "prompt", "invalid_value"),
    ({"prompt": [-1], "echo": True}, 400, "prompt", "invalid_value"),
    ({"prompt": [1 << 63]}, 400, "prompt", "invalid_value"),
    ({"prompt": [7] * 500}, 400, "prompt", "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": 500}, 400, "max_tokens", "context_length_exceeded"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens", "invalid_type"),
    ({"prompt": "x", "n": 65}, 400, "n", "invalid_value"),
    ({"prompt": ["x"] * 10, "n": 64, "temperature": 1}, 400, "n", "invalid_value"),
    ({"prompt": "x", "n": 2, "temperature": 0}, 400, "n", "invalid_value"),
    ({"prompt": "x", "best_of": 2}, 400, "best_of", "unsupported_parameter"),
    ({"prompt": "x", "logprobs": 21}, 400, "logprobs", "invalid_value"),
    ({"prompt": "x", "stop": ["a"] * 17}, 400, "stop", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"x": 1}}, 400, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"999999": 1}}, 400, "logit_bias", "invalid_value"),
    ({"prompt": "x", "model": "gpt"}, 404, "model", "model_not_found"),
    ({"prompt": "x", "suffix": "y"}, 400, "suffix", "unsupported_parameter"),
    ({"prompt": "x", "guided_json": {}, "guided_regex": "a"}, 400, "structured_outputs", "invalid_value"),
    ({"prompt": "x", "guided_choice": "a"}, 400, "guided_choice", "invalid_type"),
    (
        {"prompt": "x", "guided_regex": "a", "structured_outputs": {"regex": "a"}},
        400,
        "structured_outputs",
        "invalid_value",
    ),
    (
        {"prompt": "x", "guided_regex": "a", "response_format": {"type": "json_object"}},
        400,
        "structured_outputs",
        "invalid_value",
    ),
    (
        {"prompt": "x", "response_format": {"type": "text", "schema": {}}},
        400,
        "response_format.schema",
        "invalid_value",
    ),
    ({"prompt": "x", "vllm_xargs": {"a": 1}}, 400, "vllm_xargs", "unsupported_parameter"),
    ({"prompt": "x", "kv_transfer_params": {"a": 1}}, 400, "kv_transfer_params", "unsupported_parameter"),
    ({"prompt": "x", "thinking_token_budget": 5}, 400, "thinking_token_budget", "unsupported_parameter"),
    ({"prompt": "x", "thinking_token_budget": 0}, 400, "thinking_token_budget", "unsupported_parameter"),
    *(
        ({"prompt": "x", name: value}, 400, name, "unsupported_parameter")
        for name, value in {
            "web_search_options": {},
            "enable_thinking": False,
            "thinking": {"type": "disabled"},
            "do_sample": False,
            "regex": "a",
            "ebnf": "a",
            "grammar": "a",
            "json_schema": {"type": "object"},
            "stop_regex": "a",
            "max_new_tokens": 3,
            "num_beams": 2,
            "lora_request": {},
            "lora_path": "x",
            "typical_p": 0.9,
            "mirostat": 2,
            "repeat_penalty": 1.1,
            "reasoning": {"effort": "low"},
            "structural_tag": "{}",
            "moderation": {"a": 1},
            "guided_decoding_backend": "outlines",
            "documents": [{}],
            "repetition_detection": {"n": 1},
        }.items()
    ),
    (
        {
            "prompt": "x",
            "do_sample": True,
            "num_beams": 1,
            "typical_p": 1.0,
            "mirostat": 0,
            "repeat_penalty": 1,
            "reasoning": {},
            "grammar": "",
            "guided_decoding_backend": "xgrammar",
            "top_logprobs": 0,
            "lora_path": None,
        },
        200,
        None,
        "",
    ),
    ({"prompt": "x", "stream_options": {}}, 400, "stream_options", "invalid_value"),
    ({"prompt": "x", "cache_salt": "s" * 300}, 400, "cache_salt", "invalid_value"),
    ({"prompt": "x", "priority": 1 << 40}, 400, "priority", "invalid_value"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, 400, "response_format.type", "invalid_value"),
    ({"prompt": "x", "user": "me", "stop": None, "n": None}, 200, None, ""),
)


@pytest.mark.parametrize("stream", [False, True])
def test_impossible_requests_name_the_field(http: httpx.Client, stream: bool) -> None:
    for body, status, param, code in BAD:
        reply = http.post("/v1/completions", json={**body, "stream": stream})
        if "stream_options" in body and stream:
            continue
        assert reply.status_code == status, (body, reply.text)
        if status != 200:
            error = reply.json()["error"]
            assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
            assert (error["param"], error["code"]) == (param, code), (body, error)


def test_chats_that_cannot_be(http: httpx.Client) -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}]}]
    for more, param in (
        ({"messages": []}, "messages"), ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": image}, "messages[0].content"), ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"), ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ):  # fmt: skip
        reply = http.post("/v1/chat/completions", json={"messages": CHAT, **more})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param, (more, reply.text)


def test_unknown_fields_are_passed_over_and_counted(http: httpx.Client) -> None:
    name = 'llmc:request_unknown_fields_total{model_name="toy"}'

    def count() -> float:
        lines = [line.split() for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
        return float(lines[0][1]) if lines else 0.0

    before = count()
    post(http, prompt="x", max_tokens=1, never_heard=1, of_it={"a": []}, user="known")
    assert count() == before + 2
