"""/v1/chat/completions: the answer's JSON, whole and in pieces, with log-probabilities; it renders no template."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.params import SamplingParams
from llmc_runtime.server.answer import Row, Usage, clamped, gather, spelled, told_scores
from llmc_runtime.server.fields import ChatRequest
from llmc_runtime.server.sampling import of_chat
from llmc_runtime.server.serving import Call, News, Serving, begun


class Chat:
    """One call of the endpoint."""

    def __init__(self, serving: Serving, asked: ChatRequest, call: Call) -> None:
        self._serving, self._asked, self._call = serving, asked, call
        self._head = {"id": call.id, "created": int(time.time()), "model": serving.names[0]}

    async def whole(self) -> dict[str, Any]:
        """The answer's JSON."""
        prompt, params = await self._ready()
        news = self._serving.run([prompt], params, self._asked, self._call)
        whole = await gather(news, [prompt], params.n)
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
                "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for i, choice in enumerate(whole.choices[0])
        ]
        told = {**self._head, "object": "chat.completion", "choices": choices, "usage": whole.usage.told()}
        if self._asked.prompt_logprobs is not None:
            told["prompt_logprobs"] = told_scores(whole.prompt_logprobs[0])
        return told

    async def pieces(self) -> AsyncIterator[dict[str, Any]]:
        """The answer's JSON, chunk by chunk; it returns once the first news are there."""
        prompt, params = await self._ready()
        news = await begun(self._serving.run([prompt], params, self._asked, self._call))
        return self._chunks(news, prompt, params)

    async def _ready(self) -> tuple[Prompt, SamplingParams]:
        asked, serving = self._asked, self._serving
        serving.check_model(asked.model)
        serving.check_ready()
        params = of_chat(asked, serving.llm)
        return await serving.prompting.of_chat(asked), params

    async def _chunks(self, news: News, prompt: Prompt, params: SamplingParams) -> AsyncIterator[dict[str, Any]]:
        usage = Usage(len(prompt.ids))
        options = self._asked.stream_options
        always = bool(options and options.continuous_usage_stats)
        last = bool(options and options.include_usage)
        head = {**self._head, "object": "chat.completion.chunk"}
        extra: dict[str, Any] = {"usage": None} if last else {}
        for i in range(params.n):
            yield {**head, "choices": [_choice(i, {"role": "assistant", "content": ""})], **extra}
        async with aclosing(news) as items:  # type: ignore[type-var]
            async for index, output in items:
                usage.take(index, output)
                for one in output.outputs:
                    choice = self._piece(one)
                    if choice is not None:
                        extra = {"usage": usage.told()} if always else extra
                        yield {**head, "choices": [choice], **extra}
        if last:
            yield {**head, "choices": [], "usage": usage.told()}

    def _piece(self, one: CompletionOutput) -> dict[str, Any] | None:
        """One chunk's choice; None where it would say nothing."""
        logprobs = self._logprobs(one.token_ids, one.logprobs or [])
        if not one.text and one.finish_reason is None and logprobs is None:
            return None
        choice = _choice(one.index, {"content": one.text} if one.text or logprobs else {}, one.finish_reason)
        choice["logprobs"] = logprobs
        if one.finish_reason is not None:
            choice["stop_reason"] = one.stop_reason
        return choice

    def _logprobs(self, tokens: list[int], rows: list[Row]) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        most = self._asked.top_logprobs or 0
        content = []
        for token, row in zip(tokens, rows, strict=True):
            ranked = sorted(row.items(), key=lambda item: item[1].rank)
            top = [_told(t, row) for t, one in ranked if one.rank <= most][:most]
            content.append({**_told(token, row), "top_logprobs": top})
        return {"content": content, "refusal": None}


def _choice(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}


def _told(token: int, row: Row) -> dict[str, Any]:
    text = spelled(token, row[token])
    return {"token": text, "logprob": clamped(row[token]), "bytes": list(text.encode(errors="replace"))}
