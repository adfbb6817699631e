"""The endpoint /v1/completions: builds the JSON of the response, complete or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

from llmc_runtime.logprobs import Logprob, LogprobRows, Row
from llmc_runtime.outputs import CompletionOutput
from llmc_runtime.prompts import Prompt
from llmc_runtime.server.call import Call
from llmc_runtime.server.http.lazy_json import Lazy
from llmc_runtime.server.http.replies import PlainEvents
from llmc_runtime.server.openai.generation_response import (
    Choice,
    GenerationResponse,
    Scores,
    clamped,
    prompt_logprobs,
    token_text,
)
from llmc_runtime.server.prompting import listed, prompts_in
from llmc_runtime.server.requests.request_fields import MAX_PROMPTS, CompletionRequest
from llmc_runtime.server.requests.sampling_fields import check_silent, kept_tokens, of_completion
from llmc_runtime.server.serving import Serving
from llmc_runtime.server.text_pool.pool import OffloadedJob


class CompletionResponse(GenerationResponse[CompletionRequest]):
    """One request to the endpoint."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, serving: Serving, request: CompletionRequest, call: Call, job: OffloadedJob | None = None
    ) -> None:
        super().__init__(serving, request, call, job)
        self._silent = request.max_tokens == 0
        self._offsets: dict[int, int] = {}  # length of the text that is already in a stream, by choice

    async def _prepare(self) -> None:
        request, serving, job = self._request, self._serving, self._job
        check_silent(request)
        serving.check_model(request.model)
        serving.check_ready()
        params = self._params = of_completion(request, serving.llm)
        count, known = prompts_in(request.prompt) if job is None else (job.parsed.prompts, job.parsed.known)
        keep = kept_tokens(request, serving.llm.config.max_model_len)
        known = known if keep is None else len(range(known)[keep])
        if count <= MAX_PROMPTS:  # larger counts are rejected below
            serving.reserve(self._call, params, count, known)
        if job is not None:
            self._prompts = await job.prompts(-1 if request.echo else self._call.logged_characters)
            return
        listed(request.prompt)  # reject malformed prompts before they wait for a thread
        self._prompts = await serving.text_threads.run(self._call.key, list, serving.prompting.completion(request))

    def _body(self, choices: list[list[Choice]], scores: list[Scores]) -> dict[str, Any]:
        if self._silent:
            self._usage.generated = 0
        built = Lazy(self._choices(choices, scores), small=False)
        return {**self._head(self.kind), "choices": built, "usage": self._usage.as_json()}

    def _choices(self, choices: list[list[Choice]], scores: list[Scores]) -> Iterator[dict[str, Any]]:
        index = 0
        for prompt, outputs, rows in zip(self._prompts, choices, scores):
            for choice in outputs:
                shown = Choice(finish_reason="length") if self._silent else choice
                body = self._choice(index, prompt, shown, rows, {})
                if self._request.prompt_logprobs is not None:
                    body["prompt_logprobs"] = prompt_logprobs(rows)
                index += 1
                yield body

    def _plain_encoder(self) -> PlainEvents | None:
        request = self._request
        if self._silent or request.echo or request.logprobs is not None or request.return_token_ids:
            return None
        choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        return PlainEvents(self._chunk(choice), "text")

    def _chunk_choices(
        self, index: int, prompt: Prompt, output: CompletionOutput, scores: Scores
    ) -> list[dict[str, Any]]:
        choice = Choice()
        if not self._silent:
            choice.take(output)
        choice.finish_reason = "length" if self._silent and output.finish_reason else output.finish_reason
        first = None if index in self._offsets else prompt
        body = self._choice(index, first, choice, scores, self._offsets)
        if body["text"] or body["finish_reason"] is not None:
            return [body]
        ids = self._request.return_token_ids and choice.token_ids
        return [body] if ids or (choice.token_ids and body["logprobs"] is not None) else []

    def _choice(
        self, index: int, prompt: Prompt | None, choice: Choice, scores: Scores, offsets: dict[int, int]
    ) -> dict[str, Any]:
        """Return the JSON of an output. If `prompt` is set and echo was requested, the prompt is included.

        `offsets` maps the choice's index to the length of its text so far.
        """
        request, ids = self._request, {}
        if request.return_token_ids:
            ids = {"token_ids": choice.token_ids} | ({} if prompt is None else {"prompt_token_ids": list(prompt.ids)})
        text, echoed = "".join(choice.text), prompt if request.echo else None
        if echoed is not None:
            text = (echoed.text or "") + text
        offsets.setdefault(index, 0)
        logprobs = None if request.logprobs is None else self._logprobs(echoed, choice, scores, offsets, index)
        return {
            "index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason, **ids,
        }  # fmt: skip

    def _logprobs(
        self, echoed: Prompt | None, choice: Choice, scores: Scores, offsets: dict[int, int], index: int
    ) -> dict[str, Any]:
        """Return OpenAI's logprobs object of an output, with those of its prompt if that is echoed.

        During encoding, offsets[index] advances to the offset of the next token. Tokens that the text lacks have no
        width.
        """
        tokens, prompting = list(choice.token_ids), self._serving.prompting
        rows: list[Sequence[Row | None]] = [choice.logprobs or []]
        every = self._request.skip_special_tokens is False
        shown: Iterator[bool] = (every or not prompting.is_special(token) for token in choice.token_ids)
        if echoed is not None:
            tokens = [*echoed.ids, *tokens]
            unseen = prompting.unseen(echoed)
            shown = chain(repeat(False, unseen), repeat(True, len(echoed.ids) - unseen), shown)
            rows = [scores or [None] * len(echoed.ids), *rows]
        texts = partial(self._texts, tokens, rows)

        def text_offsets() -> Iterator[int]:
            offset = offsets[index]
            for (_, text), has_width in zip(texts(), shown, strict=True):
                yield offset
                offset += len(text) * has_width
            offsets[index] = offset

        as_ids, pairs = self._request.return_tokens_as_token_ids, zip(tokens, chain(*rows), strict=True)
        arrays: dict[str, Iterator[Any]] = {
            "text_offset": text_offsets(),
            "token_logprobs": (None if item is None else clamped(item) for item, _ in texts()),
            "tokens": (f"token_id:{t}" for t in tokens) if as_ids else (text for _, text in texts()),
            "top_logprobs": (None if row is None else self._top(token, row) for token, row in pairs),
        }
        make: Callable[[Iterator[Any]], Any] = Lazy if len(tokens) > 1 else list
        return {name: make(items) for name, items in arrays.items()}

    def _texts(self, tokens: list[int], rows: list[Sequence[Row | None]]) -> Iterator[tuple[Logprob | None, str]]:
        """Yield each token's own log-probability, or None, and its text."""
        remaining = iter(tokens)
        for part in rows:
            for i, token in zip(range(len(part)), remaining):
                item = part.own(i) if isinstance(part, LogprobRows) else None
                yield item, self._serving.prompting.token_text(token) if item is None else token_text(token, item)

    def _top(self, token: int, row: dict[int, Logprob]) -> dict[str, float]:
        """Return the most likely candidates and the token itself, by text; the more likely of two with equal text."""
        count, as_id = self._request.logprobs or 0, self._request.return_tokens_as_token_ids
        reported = [(t, item) for t, item in row.items() if t == token or item.rank <= count]
        reported.sort(key=lambda pair: pair[1].logprob)  # the more likely one overwrites the other
        return {token_text(t, item, as_id): clamped(item) for t, item in reported}
