"""The endpoint /v1/chat/completions: builds the JSON of the response, complete or as a stream of chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from llmc_runtime.logprobs import Row
from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.sched.sampling_params import SamplingParams
from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.http.lazy_json import Lazy
from llmc_runtime.server.http.replies import PlainEvents
from llmc_runtime.server.openai.generation_response import (
    Choice,
    GenerationResponse,
    Scores,
    prompt_logprobs,
)
from llmc_runtime.server.openai.message_tokens import TokenScores
from llmc_runtime.server.requests.request_fields import ChatRequest
from llmc_runtime.server.requests.sampling_fields import of_chat
from llmc_runtime.server.tool_calls.message import Delta, MessageParser, is_cut, joined
from llmc_runtime.server.tool_calls.response_plan import ResponsePlan, plan_of
from llmc_runtime.server.updates import Updates


class ParsedChoice(Choice):
    """An output that is parsed as it arrives: parsing a long one at its end would hold the event loop for long."""

    def __init__(self, parser: MessageParser) -> None:
        super().__init__()
        self.parser, self._deltas = parser, list[Delta]()

    def take(self, update: CompletionOutput) -> None:
        """Append an update."""
        super().take(update)
        final, cut = update.finish_reason is not None, is_cut(update.finish_reason, update.stop_reason)
        self._deltas.append(self.parser.take(update.text, update.token_ids, final=final, cut=cut))

    def delta(self) -> Delta:
        """Return the parser's result for the output."""
        return joined(self._deltas)


class ChatResponse(GenerationResponse[ChatRequest]):
    """One request to the endpoint. Its only prompt is the conversation."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    _plan: ResponsePlan
    _parsers: list[MessageParser]  # one per output of a stream

    async def _prepare(self) -> None:
        request, serving = self._request, self._serving
        serving.check_model(request.model)
        serving.check_ready()
        params, plan = self._sampling(), plan_of(request, serving.formats)
        serving.reserve(self._call, params)
        prompt, plan = await self._prompt(plan)
        form = "response_format" if request.structured_outputs is None else "structured_outputs"
        if plan.tools is not None or params.structured_outputs is not None:  # making a grammar takes time
            params = await serving.text_threads.run(self._call.key, plan.constrained, params, form)
        self._prompts, self._params, self._plan = [prompt], params, plan

    def _sampling(self) -> SamplingParams:
        return of_chat(self._request, self._serving.llm)

    def _earlier(self) -> bytes:
        """Return the JSON of the items of earlier responses, which a text process puts before the messages."""
        return b""

    async def _prompt(self, plan: ResponsePlan) -> tuple[Prompt, ResponsePlan]:
        """Return the prompt, and the plan for the output after it."""
        request, serving, job = self._request, self._serving, self._job
        if job is not None:
            (prompt,) = await job.prompts(self._call.logged_characters, self._earlier())
            reasoning = plan.reasoning if job.done.reasons else None
            return prompt, replace(plan, reasoning=reasoning, opened=job.done.opened, earlier=job.done.earlier)
        arguments = request, None if plan.tools is None else plan.tools.shown, serving.formats.short_ids
        prompt = await serving.text_threads.run(self._call.key, serving.prompting.chat, *arguments)
        return prompt, plan.after(prompt, request)

    async def _updates(self) -> Updates:
        """Start generation. Errors of a grammar that derives from tools are attributed to the tools."""
        plan = self._plan
        try:
            async with aclosing(self._generate(replace(self._call, visible=plan.visible))) as items:  # type: ignore[type-var]
                async for item in items:
                    yield item
        except ApiError as e:
            if plan.tools is not None and e.param in ("structured_outputs", "response_format"):
                e.message = re.sub("^(structured_outputs|response_format): grammar", "tools: their grammar", e.message)
                e.param = "tools"
            raise

    def _body(self, choices: list[list[Choice]], scores: list[Scores]) -> dict[str, Any]:
        built = [self._choice(i, choice) for i, choice in enumerate(choices[0])]  # counts the reasoning tokens
        body = {**self._head(self.kind), "choices": built, "usage": self._usage.as_json()}
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(scores[0])
        if self._request.return_token_ids:
            body["prompt_token_ids"] = list(self._prompts[0].ids)
        return body

    def _new_choice(self) -> Choice:
        return ParsedChoice(self._parser())

    def _parser(self) -> MessageParser:
        return MessageParser(self._plan, self._request.include_reasoning is False)

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """Return the JSON of a finished output, and count its reasoning tokens."""
        assert isinstance(choice, ParsedChoice)
        parser = choice.parser
        message = parser.message(choice.delta())
        if self._plan.reasoning is not None:
            self._usage.reasoning = (self._usage.reasoning or 0) + parser.reasoning_tokens
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs or []),
            "finish_reason": parser.finish_reason(choice.finish_reason),
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if self._request.return_token_ids else {}),
        }

    def _opening_chunks(self) -> Iterator[dict[str, Any]]:
        self._parsers = [] if self._plan.plain else [self._parser() for _ in range(self._params.n)]
        for i in range(self._params.n):
            chunk = self._chunk(_choice(i, {"role": "assistant", "content": ""}))
            if i == 0 and self._request.return_token_ids:
                chunk["prompt_token_ids"] = list(self._prompts[0].ids)
            yield chunk

    def _plain_encoder(self) -> PlainEvents | None:
        if not self._plan.plain or self._request.logprobs or self._request.return_token_ids:
            return None
        return PlainEvents(self._chunk(_choice(0, {"content": ""})), "content")

    def _chunk_choices(
        self, index: int, prompt: Prompt, output: CompletionOutput, scores: Scores
    ) -> list[dict[str, Any]]:
        """See GenerationResponse.

        Tool calls and the finish reason are sent in separate chunks, as some clients check the finish reason first.
        """
        logprobs = self._logprobs(output.token_ids, output.logprobs or [])
        delta, finish = self._message_delta(index, output)
        ids = self._request.return_token_ids and output.token_ids
        if not delta and finish is None and logprobs is None and not ids:
            return []
        choices = [_choice(index, delta or ({"content": ""} if logprobs else {}))]
        choices[0]["logprobs"] = logprobs
        if self._request.return_token_ids:
            choices[0]["token_ids"] = output.token_ids
        if finish is not None:
            if "tool_calls" in delta:
                choices.append(_choice(index, {}))
            choices[-1] |= {"finish_reason": finish, "stop_reason": output.stop_reason}
        return choices

    def _message_delta(self, index: int, output: CompletionOutput) -> tuple[dict[str, Any], str | None]:
        """Return (the addition of an output to its message, its finish reason, which may be that of tool calls)."""
        finish = output.finish_reason
        if not self._parsers:
            return {"content": output.text} if output.text else {}, finish
        parser, cut = self._parsers[index], is_cut(finish, output.stop_reason)
        delta = parser.take(output.text, output.token_ids, final=finish is not None, cut=cut).fields()
        if self._plan.reasoning is not None:
            self._usage.reasoning = sum(parser.reasoning_tokens for parser in self._parsers)
        return delta, parser.finish_reason(finish)

    def _logprobs(self, tokens: list[int], rows: Sequence[Row | None]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        content = self._token_scores().content(tokens, rows)
        return {"content": Lazy(content) if len(tokens) > 1 else list(content), "refusal": None}

    def _token_scores(self) -> TokenScores:
        request = self._request
        return TokenScores(self._serving.prompting, request.top_logprobs or 0, bool(request.return_tokens_as_token_ids))


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
