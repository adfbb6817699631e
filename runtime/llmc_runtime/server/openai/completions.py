"""The endpoint /v1/completions: builds the JSON of the response, complete or as a stream of chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import Any

from llmc_runtime.logprobs import Logprob, LogprobRows, Row
from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.http.lazy_json import Lazy, is_lazy
from llmc_runtime.server.http.replies import Final, Plain, event
from llmc_runtime.server.openai.response import Choice, Usage, Whole, clamped, gather, spelled, told_scores
from llmc_runtime.server.prompting import MAX_PROMPTS, prompts_in
from llmc_runtime.server.requests.request_fields import CompletionRequest
from llmc_runtime.server.requests.sampling_fields import check_silent, of_completion
from llmc_runtime.server.serving import Call, News, Serving, begun
from llmc_runtime.server.text_pool.pool import OffloadedJob

Scores = Sequence[Row | None] | None
Chunks = AsyncIterator[dict[str, Any] | bytes]


class Completion:
    """One request to the endpoint. If the body was large, `job` has its prompts."""

    def __init__(self, serving: Serving, asked: CompletionRequest, call: Call, job: OffloadedJob | None = None) -> None:
        self._serving, self._asked, self._call, self._job = serving, asked, call, job
        self._head = {
            "id": call.id, "object": "text_completion", "created": int(time.time()), "model": serving.names[0],
        }  # fmt: skip
        self._silent = asked.max_tokens == 0  # only the prompt is scored

    async def whole(self) -> dict[str, Any]:
        """Return the JSON of the complete response."""
        prompts, params = await self._ready()
        news = self._serving.run(prompts, params, self._asked, self._call)
        whole = await gather(news, prompts, params.n)
        if self._silent:
            whole.usage.generated = 0
        return {**self._head, "choices": Lazy(self._choices(prompts, whole), small=False), "usage": whole.usage.told()}

    def _choices(self, prompts: list[Prompt], whole: Whole) -> Iterator[dict[str, Any]]:
        index = 0
        for prompt, outputs, scores in zip(prompts, whole.choices, whole.prompt_logprobs):
            for choice in outputs:
                if self._silent:
                    choice = Choice(finish_reason="length")
                told = self._choice(index, prompt, choice, scores, {})
                if self._asked.prompt_logprobs is not None:
                    told["prompt_logprobs"] = told_scores(scores)
                index += 1
                yield told

    async def pieces(self) -> Chunks:
        """Return a stream of chunks, as JSON values or encoded events, once the first output is available."""
        prompts, params = await self._ready()
        news = await begun(self._serving.run(prompts, params, self._asked, self._call))
        return self._chunks(news, prompts, params)

    async def _ready(self) -> tuple[list[Prompt], SamplingParams]:
        asked, serving = self._asked, self._serving
        check_silent(asked)
        serving.check_model(asked.model)
        serving.check_ready()
        params = of_completion(asked, serving.llm)
        job = self._job
        count, known = prompts_in(asked.prompt) if job is None else (job.parsed.prompts, job.parsed.known)
        if count <= MAX_PROMPTS:  # larger counts are rejected below
            serving.reserve(self._call, params, count, known)
        if job is not None:
            return await job.prompts(-1 if asked.echo else self._call.logged_characters), params
        async with serving.lanes.slot(self._call.key):
            return await serving.prompting.of_completion(asked), params

    async def _chunks(self, news: News, prompts: list[Prompt], params: SamplingParams) -> Chunks:
        usage = Usage(sum(len(prompt.ids) for prompt in prompts))
        offsets: dict[int, int] = {}  # length of the text so far, by choice
        options = self._asked.stream_options
        always = bool(options and options.continuous_usage_stats)
        last = bool(options and options.include_usage)
        plain = None if always else self._plain(last)
        left, ends = params.n * len(prompts), b""  # outputs that have not ended; the last one's final event
        async with aclosing(news) as items:  # type: ignore[type-var]
            async for i, output in items:
                if not self._silent:
                    usage.take(i, output)
                for one in output.outputs:
                    index = i * params.n + one.index
                    if plain is not None and one.finish_reason is None:
                        if one.text:
                            yield plain.event(index, one.text)
                        continue
                    choice = self._piece(index, prompts[i], one, output.prompt_logprobs, offsets)
                    if choice is None:
                        continue
                    chunk = {**self._head, "choices": [choice]}
                    if always or last:
                        chunk["usage"] = usage.told() if always else None
                    left -= one.finish_reason is not None
                    if left or is_lazy(chunk):
                        yield chunk
                    else:
                        ends = event(chunk)
        if last:
            ends += event({**self._head, "choices": [], "usage": usage.told()})
        yield Final(ends)

    def _plain(self, usage: bool) -> Plain | None:
        """Return the encoder of chunks that contain only text, or None if chunks contain more."""
        asked = self._asked
        if self._silent or asked.echo or asked.logprobs is not None or asked.return_token_ids:
            return None
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        return Plain({**self._head, "choices": [choice], **({"usage": None} if usage else {})}, "text")

    def _piece(
        self, index: int, prompt: Prompt, one: CompletionOutput, scores: Scores, offsets: dict[int, int]
    ) -> dict[str, Any] | None:
        """Return the choice of a chunk, or None if it would be empty."""
        choice = Choice()
        if not self._silent:
            choice.take(one)
        choice.finish_reason = "length" if self._silent and one.finish_reason else one.finish_reason
        told = self._choice(index, None if index in offsets else prompt, choice, scores, offsets)
        logprobs = told["logprobs"]
        if not told["text"] and not choice.token_ids and told["finish_reason"] is None:
            return None
        silent = not told["text"] and told["finish_reason"] is None and logprobs is None
        return None if silent and not self._asked.return_token_ids else told

    def _choice(
        self, index: int, prompt: Prompt | None, choice: Choice, scores: Scores, offsets: dict[int, int]
    ) -> dict[str, Any]:
        """Return the JSON of an output. If `prompt` is set and echo was requested, the prompt is included.

        `offsets` maps the choice's index to the length of its text so far.
        """
        asked, ids = self._asked, {}
        if asked.return_token_ids:
            ids = {"token_ids": choice.token_ids} | ({} if prompt is None else {"prompt_token_ids": prompt.ids})
        tokens = list(choice.token_ids)
        rows: list[Sequence[Row | None]] = [choice.logprobs or []]
        text, prompting = "".join(choice.text), self._serving.prompting
        shown = [asked.skip_special_tokens is False or not prompting.is_special(token) for token in tokens]
        if asked.echo and prompt is not None:
            text = (prompt.text or "") + text
            tokens = prompt.ids + tokens
            unseen = prompting.unseen(prompt)
            shown = [False] * unseen + [True] * (len(prompt.ids) - unseen) + shown
            rows = [scores or [None] * len(prompt.ids), *rows]
        offsets.setdefault(index, 0)
        logprobs = None if asked.logprobs is None else self._logprobs(tokens, rows, shown, offsets, index)
        return {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason, **ids,
        }  # fmt: skip

    def _logprobs(
        self,
        tokens: list[int],
        rows: list[Sequence[Row | None]],
        shown: list[bool],
        offsets: dict[int, int],
        index: int,
    ) -> dict[str, Any]:
        """Return OpenAI's logprobs object.

        During encoding, offsets[index] advances to the offset of the next token. Tokens that are not `shown` have no
        width.
        """
        texts = partial(self._texts, tokens, rows)

        def places() -> Iterator[int]:
            offset = offsets[index]
            for (_, text), seen in zip(texts(), shown, strict=True):
                yield offset
                offset += len(text) * seen
            offsets[index] = offset

        as_ids, each = self._asked.return_tokens_as_token_ids, zip(tokens, chain(*rows), strict=True)
        out: dict[str, Iterator[Any]] = {
            "text_offset": places(),
            "token_logprobs": (None if one is None else clamped(one) for one, _ in texts()),
            "tokens": (f"token_id:{t}" for t in tokens) if as_ids else (text for _, text in texts()),
            "top_logprobs": (None if row is None else self._top(token, row) for token, row in each),
        }
        make: Callable[[Iterator[Any]], Any] = Lazy if len(tokens) > 1 else list
        return {name: make(items) for name, items in out.items()}

    def _texts(self, tokens: list[int], rows: list[Sequence[Row | None]]) -> Iterator[tuple[Logprob | None, str]]:
        """Yield each token's own log-probability, or None, and its text."""
        at = 0
        for some in rows:
            for i in range(len(some)):
                token, at = tokens[at], at + 1
                one = some.own(i) if isinstance(some, LogprobRows) else None
                yield one, self._serving.prompting.spelled(token) if one is None else spelled(token, one)

    def _top(self, token: int, row: dict[int, Logprob]) -> dict[str, float]:
        """Return the most likely candidates and the token itself, by text; the more likely of two with equal text."""
        most, as_id = self._asked.logprobs or 0, self._asked.return_tokens_as_token_ids
        kept = [(t, one) for t, one in row.items() if t == token or one.rank <= most]
        return {
            spelled(t, one, as_id): clamped(one) for t, one in sorted(kept, key=lambda item: item[1].logprob)
        }  # the more likely one overwrites the other
