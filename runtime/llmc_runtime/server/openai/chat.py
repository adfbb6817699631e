"""The endpoint /v1/chat/completions: builds the JSON of the response, complete or as a stream of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from llmc_runtime.logprobs import Row
from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.lazy_json import Lazy
from llmc_runtime.server.http.replies import Final, Plain, event
from llmc_runtime.server.openai.response import Choice, Usage, clamped, gather, spelled, told_scores
from llmc_runtime.server.requests.request_fields import ChatRequest
from llmc_runtime.server.requests.sampling_fields import of_chat
from llmc_runtime.server.serving import Call, News, Serving, begun
from llmc_runtime.server.text_pool.pool import OffloadedJob
from llmc_runtime.server.tool_calls.message import Turn, is_cut
from llmc_runtime.server.tool_calls.response_plan import Plan, plan_of


class Chat:
    """One request to the endpoint. If the body was large, `job` has its messages."""

    def __init__(self, serving: Serving, asked: ChatRequest, call: Call, job: OffloadedJob | None = None) -> None:
        self._serving, self._asked, self._call, self._job = serving, asked, call, job
        self._head = {"id": call.id, "created": int(time.time()), "model": serving.names[0]}

    async def whole(self) -> dict[str, Any]:
        """Return the JSON of the complete response."""
        prompt, params, plan = await self._ready()
        whole = await gather(self._news(prompt, params, plan), [prompt], params.n)
        choices = [self._choice(i, choice, plan, whole.usage) for i, choice in enumerate(whole.choices[0])]
        told = {**self._head, "object": "chat.completion", "choices": choices, "usage": whole.usage.told()}
        if self._asked.prompt_logprobs is not None:
            told["prompt_logprobs"] = told_scores(whole.prompt_logprobs[0])
        if self._asked.return_token_ids:
            told["prompt_token_ids"] = prompt.ids
        return told

    async def pieces(self) -> AsyncIterator[dict[str, Any] | bytes]:
        """Return a stream of chunks, as JSON values or encoded events, once the first output is available."""
        prompt, params, plan = await self._ready()
        news = await begun(self._news(prompt, params, plan))
        return self._chunks(news, prompt, params, plan)

    async def _ready(self) -> tuple[Prompt, SamplingParams, Plan]:
        asked, serving = self._asked, self._serving
        serving.check_model(asked.model)
        serving.check_ready()
        params, plan = of_chat(asked, serving.llm), plan_of(asked, serving.dialect)
        serving.reserve(self._call, params)
        prompt, plan = await self._prompt(plan)
        form = "response_format" if asked.structured_outputs is None else "structured_outputs"
        if plan.tools is not None or params.structured_outputs is not None:  # compiling schemas to a grammar takes time
            return prompt, await asyncio.to_thread(plan.constrained, params, form), plan
        return prompt, params, plan

    async def _prompt(self, plan: Plan) -> tuple[Prompt, Plan]:
        """Return the prompt, and the plan for the output after it."""
        asked, serving, job = self._asked, self._serving, self._job
        if job is not None:
            (prompt,) = await job.prompts(self._call.logged_characters)
            thoughts = plan.thoughts if job.done.reasons else None
            return prompt, replace(plan, thoughts=thoughts, opened=job.done.opened, earlier=job.parsed.earlier)
        tools = None if plan.tools is None else plan.tools.given
        async with serving.lanes.slot(self._call.key):
            prompt = await serving.prompting.of_chat(asked, tools, serving.dialect.short_ids)
        return prompt, plan.behind(prompt, asked)

    async def _news(self, prompt: Prompt, params: SamplingParams, plan: Plan) -> News:
        """Yield the engine's outputs. Errors of a grammar that was derived from tools are attributed to the tools."""
        call = replace(self._call, visible=plan.visible)
        try:
            async with aclosing(self._serving.run([prompt], params, self._asked, call)) as news:  # type: ignore[type-var]
                async for item in news:
                    yield item
        except ApiError as e:
            if plan.tools is not None and e.param == "structured_outputs":
                e.param, e.message = "tools", e.message.replace("structured_outputs: grammar", "tools: their grammar")
            raise

    def _choice(self, index: int, choice: Choice, plan: Plan, usage: Usage) -> dict[str, Any]:
        """Return the JSON of a finished output, and count its reasoning tokens."""
        turn, text = Turn(plan, self._asked.include_reasoning is False), "".join(choice.text)
        message = turn.message(text, choice.token_ids, is_cut(choice.finish_reason, choice.stop_reason))
        if plan.thoughts is not None:
            usage.reasoning = (usage.reasoning or 0) + turn.reasoning_tokens
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs or []),
            "finish_reason": turn.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if self._asked.return_token_ids else {}),
        }

    async def _chunks(
        self, news: News, prompt: Prompt, params: SamplingParams, plan: Plan
    ) -> AsyncIterator[dict[str, Any] | bytes]:
        usage = Usage(len(prompt.ids))
        turns = None if plan.plain else [Turn(plan, self._asked.include_reasoning is False) for _ in range(params.n)]
        options = self._asked.stream_options
        always = bool(options and options.continuous_usage_stats)
        last = bool(options and options.include_usage)
        head = {**self._head, "object": "chat.completion.chunk"}
        extra: dict[str, Any] = {"usage": None} if last else {}
        plain = None
        ids = {"prompt_token_ids": prompt.ids} if self._asked.return_token_ids else {}
        if plan.plain and not always and not self._asked.logprobs and not ids:
            plain = Plain({**head, "choices": [_choice(0, {"content": ""})], **extra}, "content")
        extra = {"usage": usage.told()} if always else extra
        for i in range(params.n):
            yield {
                **head,
                "choices": [_choice(i, {"role": "assistant", "content": ""})],
                **extra,
                **(ids if i == 0 else {}),
            }
        async with aclosing(news) as items:  # type: ignore[type-var]
            async for index, output in items:
                usage.take(index, output)
                for one in output.outputs:
                    if plain is not None and one.finish_reason is None:
                        if one.text:
                            yield plain.event(one.index, one.text)
                        continue
                    choices = self._pieces(one, None if turns is None else turns[one.index])
                    if turns is not None and plan.thoughts is not None:
                        usage.reasoning = sum(turn.reasoning_tokens for turn in turns)
                    for choice in choices:
                        extra = {"usage": usage.told()} if always else extra
                        yield {**head, "choices": [choice], **extra}
        if last:
            yield Final(event({**head, "choices": [], "usage": usage.told()}))

    def _pieces(self, one: CompletionOutput, turn: Turn | None) -> list[dict[str, Any]]:
        """Return the choices of the next chunks, or none if they would be empty.

        Tool calls and the finish reason are sent in separate chunks, as some clients check the finish reason first.
        """
        logprobs, finish = self._logprobs(one.token_ids, one.logprobs or []), one.finish_reason
        if turn is None:
            delta: dict[str, Any] = {"content": one.text} if one.text else {}
        else:
            cut = is_cut(finish, one.stop_reason)
            delta = turn.take(one.text, one.token_ids, finish is not None, cut).delta()
            finish = turn.finish_reason(finish)
        ids = self._asked.return_token_ids and one.token_ids
        if not delta and finish is None and logprobs is None and not ids:
            return []
        choices = [_choice(one.index, delta or ({"content": ""} if logprobs else {}))]
        choices[0]["logprobs"] = logprobs
        if self._asked.return_token_ids:
            choices[0]["token_ids"] = one.token_ids
        if finish is not None:
            if "tool_calls" in delta:
                choices.append(_choice(one.index, {}))
            choices[-1] |= {"finish_reason": finish, "stop_reason": one.stop_reason}
        return choices

    def _logprobs(self, tokens: list[int], rows: Sequence[Row | None]) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        content = self._content(tokens, rows)
        return {"content": Lazy(content) if len(tokens) > 1 else list(content), "refusal": None}

    def _content(self, tokens: list[int], rows: Sequence[Row | None]) -> Iterator[dict[str, Any]]:
        most, as_id = self._asked.top_logprobs or 0, bool(self._asked.return_tokens_as_token_ids)
        for token, row in zip(tokens, rows, strict=True):
            assert row is not None  # generated tokens always have a row
            ranked = sorted(row.items(), key=lambda item: item[1].rank)
            top = [self._told(t, row, as_id) for t, one in ranked if one.rank <= most][:most]
            yield {**self._told(token, row, as_id), "top_logprobs": top}

    def _told(self, token: int, row: Row, as_id: bool) -> dict[str, Any]:
        return {
            "token": spelled(token, row[token], as_id),
            "logprob": clamped(row[token]),
            "bytes": list(self._serving.prompting.raw(token, spelled(token, row[token]))),
        }


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
