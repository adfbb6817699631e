"""EngineCore: submits requests with their grammars to an engine, and aborts them.

LLM and the engine process use it, each in the thread that owns the engine (see engine.Engine).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

from llmc_runtime.engine.input_processor import EngineRequest, are_ids, params_of_output
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.request import Request
from llmc_runtime.sched.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmc_runtime.engine.engine import Engine
    from llmc_runtime.grammar import GrammarGuide, Grammars, Opening


class EngineCore:
    """An engine and the grammars of its vocabulary.

    `open_grammars` is called when the first grammar is needed. It returns None if the artifact has no tokenizer.
    """

    def __init__(self, engine: Engine, open_grammars: Callable[[], Grammars | None]) -> None:
        self.engine, self._open_grammars = engine, open_grammars
        self._grammars: Grammars | None = None

    def grammars(self) -> Grammars:
        """Return the grammars, opened on first use. Raises LlmcError E620 if the artifact has no tokenizer."""
        if self._grammars is None:
            self._grammars = self._open_grammars()
            if self._grammars is None:
                cause = "structured outputs need the tokenizer, which the artifact lacks"
                raise LlmcError("E620", cause, "use allowed_token_ids or logit_bias")
            self.engine.pump = self._grammars.pump
        return self._grammars

    def prepare(self) -> str:
        """Build the vocabulary of the grammars now. Return "" or the reason why that failed."""
        try:
            return self.grammars().prepare()
        except LlmcError as e:
            return e.cause

    def open_grammar(self, params: SamplingParams, tenant: str = "") -> Opening | None:
        """Start the compilation of the request's grammar, which runs in another process. None if it has none.

        Raises LlmcError E608 if the engine has ended, E620 without a tokenizer, and those of `Grammars.open`.
        """
        if params.structured_outputs is None:
            return None
        if self.engine.error is not None:
            raise self.engine.error
        return self.grammars().open(params.structured_outputs, tenant, params.n)

    def submit(self, request: EngineRequest, guides: Sequence[GrammarGuide] = (), aborted: Container[int] = ()) -> None:
        """Queue all outputs of a request except those in `aborted`, or none of them. Output i follows `guides[i]`.

        Raises LlmcError E6xx if the request can never run.
        """
        leader, checked = None, are_ids(request.prompt.ids, self.engine.scheduler.config.vocab_size)
        try:
            for index, number in enumerate(request.numbers):
                guide = guides[index] if guides else None
                if number in aborted:
                    if guide is not None:
                        guide.close()
                    continue
                output = Request(
                    str(number),
                    request.prompt.ids,
                    params_of_output(request.params, index),
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    bad_words=request.bad_words,
                    guide=guide,
                    leader=leader,
                    tenant=request.tenant,
                    checked=checked,
                )
                self.engine.add(output)
                leader = leader or output
        except BaseException:
            self.abort(map(str, request.numbers))
            for guide in guides:
                guide.close()
            raise

    def abort(self, ids: Iterable[str]) -> list[str]:
        """End these outputs now; no deltas follow. Return the ids that are not live."""
        return [request_id for request_id in ids if not self.engine.abort(request_id)]

    @property
    def grammars_fd(self) -> int | None:
        """A file descriptor that is readable when a grammar process has answered; None while there are none."""
        return None if self._grammars is None else self._grammars.fileno()

    def close(self) -> None:
        """End the grammar processes. The engine's device stays open."""
        if self._grammars is not None:
            self._grammars.close()
