"""Random requests of every kind, in random batches: their outputs with drafts are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from draw import of_test
from kernel_cache import CACHE
from llmc_runtime import LLM, SamplingParams, StructuredOutputsParams
from llmc_runtime.drafts import DraftContext
from llmc_runtime.format.folder import Folder
from llmc_runtime.sched.speculation import Speculation
from llmc_runtime.sched.suffix_draft import SuffixDraft

from llmc.driver import compile_model
from llmc.options import Options
from tests.runtime.deferred_device import defer
from tests.runtime.time_limit import time_limit

DEMO = Path(__file__).parents[2] / "examples" / "demo-model"
DRAFTS = {"draft": str(DEMO.parent / "demo-model-small"), "eagle": f"eagle:{DEMO.parent / 'demo-model-head'}"}
KNOWN = "known:4"  # drafts that are nearly always right: ends are in the middle of accepted ones
METHODS = ("ngram:4", "ngram:1", "suffix:4", "draft:4", "draft:2", "eagle:4", "eagle:1", "other:4", KNOWN)
REQUESTS = 24
LONGEST = 120  # seconds of all requests with drafts, which take less than ten of a core
ABORTED = 4  # every so many requests one is also run as a stream that is closed early
POSITIONS, CHUNK = 1024, 512  # of a sequence, and tokens of a step
FEW_PAGES = 72  # hardly more than one sequence of full length
TEXTS = (
    "one two three. one two three. one two three. one two", "Once upon a time", "What is a river?\nA river is",
    '{"a": 1, "b": 2}, {"a": 1,', "1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", "na\u00efve \u2014 \u65e5\u672c ", "a",
)  # fmt: skip
STOPS = ([" the"], ["."], ["e", "xyz"], ["three. one two th"], ["\n"], [" two three. o"])
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": r"( one two three\.){2,9}"},
    {"regex": "[a-c]+[0-9]{3}"},
    {"choice": ["one two three", "one two four", "river"]},
    {"json": {"type": "object", "properties": {"b": {"enum": ["x", "yy"]}}, "required": ["b"]}},
    {"grammar": 'start: ("one" | "two" " ")+ "."'},
)
# Of parameters that a request may have: the share of requests that have it, and its values.
OPTIONAL: dict[str, tuple[float, tuple[Any, ...]]] = {
    "top_k": (0.3, (1, 3, 20)),
    "top_p": (0.3, (0.5, 0.9, 0.99)),
    "min_p": (0.2, (0.02, 0.3)),
    "repetition_penalty": (0.25, (0.8, 1.1, 1.5)),
    "presence_penalty": (0.2, (-1.0, 0.5, 2.0)),
    "frequency_penalty": (0.2, (-0.5, 0.7)),
    "stop": (0.35, STOPS),
    "include_stop_str_in_output": (0.3, (True,)),
    "ignore_eos": (0.5, (True,)),
    "logprobs": (0.3, (0, 1, 5)),
    "prompt_logprobs": (0.15, (0, 2)),
    "bad_words": (0.15, (["two"], ["the", "one two"], ["a"])),
    "skip_special_tokens": (0.1, (False,)),
}

pytestmark = pytest.mark.slow(seconds=15)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demonstration model with its sibling, with its head, and by itself, and the sibling as another artifact."""
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("requests")
    for name, draft in DRAFTS.items():
        compile_model(DEMO, folder / f"{name}.llmc", Options(cache=CACHE, draft=draft))
    compile_model(DEMO, folder / "plain.llmc", Options(cache=CACHE, speculate=4))
    compile_model(DRAFTS["draft"], folder / "other.llmc", Options(cache=CACHE, drafts_for=folder / "plain.llmc"))
    return {name: folder / f"{name}.llmc" for name in (*DRAFTS, "plain", "other")}


def prompt_of(rng: Random, tokenizer: Any) -> list[int]:
    """Return a text, random ids, or few ids again and again: as many as a chunk, or almost as many as positions."""
    kind, words = rng.random(), [rng.randrange(3, 4096) for _ in range(rng.randrange(1, 6))]
    if kind < 0.5:
        return list(tokenizer.encode(rng.choice(TEXTS)))
    if kind < 0.65:
        return [rng.randrange(3, 4096) for _ in range(rng.choice((1, 2, 15, 16, 17, 33)))]
    if kind < 0.85:
        return (words * POSITIONS)[: rng.choice((31, 32, 64, 300, CHUNK - 1, CHUNK, CHUNK + 1))]
    return (tokenizer.encode(rng.choice(TEXTS)) * POSITIONS)[: POSITIONS - rng.choice((1, 2, 4, 6, 16, 40))]


def params_of(rng: Random, prompt: list[int]) -> SamplingParams:
    """Draw the sampling parameters of a request; those with long prompts may run into the end of the context."""
    values: dict[str, Any] = {"temperature": rng.choice((0, 0, 0, 0.3, 0.7, 1.0, 1.7)), "seed": rng.randrange(1000)}
    longest = rng.choice((1, 2, 3, 5, 17, 40, 80))
    endless = len(prompt) > 0.9 * POSITIONS and rng.random() < 0.5
    values["max_tokens"] = None if endless else min(longest, POSITIONS - len(prompt))
    for name, (share, choices) in OPTIONAL.items():
        if rng.random() < share:
            values[name] = rng.choice(choices)
    if rng.random() < 0.25:
        values["stop_token_ids"] = [rng.randrange(3, 600) for _ in range(8)]
    if rng.random() < 0.2:
        values["logit_bias"] = {rng.randrange(3, 4096): rng.choice((-100.0, 5.0, 20.0)) for _ in range(4)}
    if rng.random() < 0.2 and values["temperature"]:
        values["n"] = rng.choice((2, 3))
    kind = rng.random()
    if kind < 0.1:
        values["allowed_token_ids"] = [rng.randrange(3, 4096) for _ in range(rng.choice((1, 2, 6)))]
    elif kind < 0.3:
        values["structured_outputs"] = StructuredOutputsParams(**rng.choice(FORMS))
    if kind < 0.3:
        values.pop("bad_words", None)  # together, they may exclude all tokens
    else:
        values["min_tokens"] = min(rng.choice((0, 0, 1, 4, 10)), values["max_tokens"] or 10)
    return SamplingParams(**values)


def stop_inside(rng: Random, tokenizer: Any, params: SamplingParams, tokens: list[int]) -> SamplingParams:
    """Return parameters with which half of the requests that give these tokens stop at one of them, or at a text."""
    if len(tokens) < 2 or params.structured_outputs is not None or rng.random() < 0.5:
        return params
    at = rng.randrange(1, len(tokens))
    text = tokenizer.decode(tokens[at : at + 2])
    if rng.random() < 0.5 or not text or not text.isascii():
        return replace(params, stop_token_ids=[tokens[at]])
    return replace(params, stop=[text])


def draft_known_texts(rng: Random, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the method "suffix" draft what follows in these texts, where one token in ten is wrong."""

    def propose(self: SuffixDraft, context: DraftContext, most: int) -> list[int]:
        tokens, count = list(context.tokens), len(context.tokens)
        text = next((text for text in texts if len(text) > count and text[:count] == tokens), tokens)
        return [token if rng.random() < 0.9 else 3 for token in text[count : count + most]]

    monkeypatch.setattr(SuffixDraft, "propose", propose)
    monkeypatch.setattr(SuffixDraft, "end", lambda self, context: None)


def outputs(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """Return what a user sees of each request: texts, tokens, reasons, log-probabilities of outputs and prompt."""
    found = []
    for request in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
        rows = [[*(o.logprobs or ())] for o in request.outputs]
        logprobs = [
            [(token, round(x.logprob, 3), x.rank) for token, x in row.items()]
            for row in (*(request.prompt_logprobs or ()), *(row for one in rows for row in one))
            if row is not None
        ]
        ends = [(o.text, list(o.token_ids), o.finish_reason, o.stop_reason) for o in request.outputs]
        found.append((ends, logprobs))
    return found


def close_early(llm: LLM, rng: Random, prompts: list[list[int]], params: list[SamplingParams], want: list[Any]) -> None:
    """Begin a stream of every ABORTED-th request and read a few pieces of each by turns; then close them all. What was
    read is the beginning of the outputs.
    """
    chosen = [i for i in range(len(prompts)) if i % ABORTED == 0 and params[i].n == 1]
    streams = {i: llm.stream({"prompt_token_ids": prompts[i]}, params[i]) for i in chosen}
    pieces: dict[int, list[Any]] = {i: [] for i in chosen}
    for _ in range(rng.randrange(1, 16)):
        for i, stream in streams.items():
            pieces[i] += [piece] if (piece := next(stream, None)) is not None else []
    for i, stream in streams.items():
        stream.close()
        ((text, tokens, *_),) = want[i][0]
        assert text.startswith("".join(piece.text for piece in pieces[i])), f"stream of request {i}: {params[i]}"
        read = [token for piece in pieces[i] for token in piece.token_ids]
        assert tokens[: len(read)] == read, f"stream of request {i}: {params[i]}"


@pytest.mark.parametrize("method", METHODS)
def test_outputs_are_those_of_plain_decoding(
    artifacts: dict[str, Path], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In random order, twice, after streams that were closed early; with or without overlap of steps, a small KV cache,
    the prefix cache, waiting for masks, and the cost model, which otherwise is replaced by as many drafts as possible.
    """
    name, _, count = method.partition(":")
    rng, path = Random(of_test()), artifacts[{"eagle": "eagle", "other": "plain"}.get(name, "draft")]
    with LLM(path, say=lambda text: None) as llm:
        prompts = [prompt_of(rng, llm.get_tokenizer()) for _ in range(REQUESTS)]
        params = [params_of(rng, prompt) for prompt in prompts]
        likely = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        texts = [
            [*prompt, *o.token_ids] for prompt, request in zip(prompts, likely, strict=True) for o in request.outputs
        ]
        for i, request in enumerate(likely):
            params[i] = stop_inside(rng, llm.get_tokenizer(), params[i], list(request.outputs[0].token_ids))
        want = outputs(llm, prompts, params)
        page_bytes = llm.engine.executor.capacity.bytes_per_page
    options: dict[str, Any] = {"enable_prefix_caching": rng.random() < 0.7, "speculate": method}
    if name == "other":
        options |= {"speculate": f"draft:{count}", "draft_model": artifacts["other"]}
        page_bytes += Folder(artifacts["other"]).manifest().kv.bytes_per_page
    if rng.random() < 0.5:
        options["kv_cache_memory_bytes"] = page_bytes * FEW_PAGES
    if overlaps := rng.random() < 0.4:
        defer(monkeypatch)
    if eager := rng.random() < 0.7:
        monkeypatch.setattr(Speculation, "choose", lambda self, request, room: room)
        monkeypatch.setattr(Speculation, "num_masked_drafts", lambda self, request, room: room)
        monkeypatch.setattr(Speculation, "wants", True)
    if method == KNOWN:
        draft_known_texts(rng, texts, monkeypatch)
        options["speculate"] = method.replace("known", "suffix")
    late = rng.random() < 0.5
    print(f"{options}, overlap of steps: {overlaps}, as many drafts as possible: {eager}, late masks: {late}")
    with time_limit(LONGEST), LLM(path, say=lambda text: None, **options) as llm:
        if late:
            llm.engine._grace = 0.0  # no step waits for masks
        for _ in range(2):
            close_early(llm, rng, prompts, params, want)
            order = rng.sample(range(REQUESTS), REQUESTS)
            found = outputs(llm, [prompts[i] for i in order], [params[i] for i in order])
            for i, one in zip(order, found, strict=True):
                assert one == want[i], f"request {i}: {len(prompts[i])} tokens, {params[i]}"
        stats = llm.stats()
        print({name: stats[name] for name in ("spec_decode_num_draft_tokens", "num_preemptions")})
        assert stats["spec_decode_num_accepted_tokens"] > 0 or not eager
        assert llm.engine.scheduler.pool.num_used == 0
