"""Structured outputs: llguidance compiles a request's grammar off the engine's loop, and a guide follows its tokens.

Everything is bounded: texts by their parameters, compiling and every mask by llguidance's own counters, and the wait
for a compile by the clock. Whatever goes wrong is an error of that one request.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.guide import empty
from llmc_runtime.sched.structured import StructuredOutputsParams
from llmc_runtime.text.tokenizer import Tokenizer

SECONDS = 10.0  # that a request waits for its grammar
THREADS = 2
KEPT = 16  # compiled grammars
# llguidance's counters: about 20 ms for the first lexer, 15 ms and 50 000 items for a mask, 20 MB of lexer states.
LIMITS: Mapping[str, Any] = MappingProxyType(
    {
        "initial_lexer_fuel": 1_000_000,
        "step_lexer_fuel": 200_000,
        "step_max_items": 50_000,
        "max_items_in_row": 2_000,
        "max_lexer_states": 10_000,
        "max_grammar_size": 200_000,
        "verbose_errors": False,
    }
)

# Keywords of JSON Schema whose values are schemas, or lists of them, and those whose values are schemas by name.
_OF_SCHEMAS = ("items", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems", "additionalItems")
_OF_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class Grammars:
    """The grammars of one vocabulary, each compiled once while it is remembered. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer | Callable[[], Tokenizer], vocab_size: int, eos: Sequence[int]) -> None:
        """A tokenizer that has to be opened first is opened with the first grammar, in its thread. `alone` is entered
        while the vocabulary is built: for large ones that takes seconds in which no other thread of Python runs."""
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, list(eos)
        self.alone: Callable[[], AbstractContextManager[None]] = nullcontext
        self._lock = threading.Lock()  # of what is remembered
        self._building = threading.Lock()  # of the vocabulary
        self._found: OrderedDict[Any, Future[Any]] = OrderedDict()
        self._pool = ThreadPoolExecutor(THREADS, "llmc-grammar")
        self._vocabulary: Any = None

    def prepare(self) -> str:
        """Build the vocabulary now, not with the first grammar; why that cannot be, else an empty text."""
        try:
            self._words(_library())
        except LlmcError as e:
            return e.cause
        return ""

    def submit(self, wanted: StructuredOutputsParams) -> Future[Any]:
        """Compile it in a thread, unless that was done. LlmcError E608 after `close`."""
        flags = (wanted.disable_any_whitespace, wanted.disable_additional_properties, wanted.whitespace_pattern)
        key = (wanted.kind, wanted.text, *flags)
        with self._lock:
            future = self._found.get(key)
            if future is None or (future.done() and future.exception() is not None):
                try:
                    future = self._found[key] = self._pool.submit(self._compile, wanted)
                except RuntimeError:
                    raise LlmcError("E608", "the LLM is closed", "open another one: LLM(...)") from None
            self._found.move_to_end(key)
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
        return future

    def wait(self, future: Future[Any]) -> Grammar:
        """The grammar of `submit`. LlmcError E650 without llguidance, E651 where it is none or too complex."""
        try:
            return Grammar(future.result(SECONDS), self._vocab_size)
        except Late:
            cause = f"the grammar was not compiled within {SECONDS:.0f} s"
            raise LlmcError("E651", cause, "ask for a simpler one") from None

    def close(self) -> None:
        """Compile nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, wanted: StructuredOutputsParams) -> Any:
        llguidance = _library()
        try:
            text = _definition(llguidance, wanted)
        except (ValueError, RecursionError, AttributeError, TypeError) as e:  # a schema that is no object, a bad GBNF
            raise _refused(wanted, str(e)) from None
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(self._words(llguidance), text, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(wanted, matcher.get_error())
        return matcher

    def _words(self, llguidance: Any) -> Any:
        """The vocabulary as llguidance has it."""
        with self._building:
            if self._vocabulary is None:
                with self.alone():
                    self._vocabulary = self._build(llguidance)
            return self._vocabulary

    def _build(self, llguidance: Any) -> Any:
        tokenizer = self._tokenizer if isinstance(self._tokenizer, Tokenizer) else self._tokenizer()
        try:
            text, eos = tokenizer.backend.to_str(), self._eos or None
            return llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
        except Exception as e:  # llguidance raises what it likes for a tokenizer of a kind that it lacks
            cause = f"llguidance cannot use the model's tokenizer: {_first_line(str(e))}"
            raise LlmcError("E651", cause, "use another model for structured outputs") from None


def _library() -> Any:
    try:
        import llguidance
    except ImportError as e:
        cause = f"structured outputs need the package llguidance: {e}"
        raise LlmcError("E650", cause, "pip install 'llmc-aot[grammar]'") from None
    return llguidance


class Grammar:
    """A compiled grammar; each request, and each of its outputs, follows it with a guide of its own."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def guide(self) -> GrammarGuide:
        """One at the beginning of the text. LlmcError E652 where its first mask is too costly."""
        return GrammarGuide(self._matcher.deep_copy(), self._vocab_size)


class GrammarGuide:
    """A Guide (see sched.guide): what the grammar takes next. The mask is made when the token before it is known, so
    that a failure is told with that token."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._size = matcher, -(-vocab_size // 32) * 4
        self._mask = self._next()

    def mask(self) -> bytes:
        """See Guide."""
        return self._mask

    def accept(self, token: int) -> bool:
        """See Guide: the text ends with an end token, and where nothing can follow. LlmcError E652."""
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise self._failed()
        if self._matcher.is_stopped():
            return True
        self._mask = self._next()
        return False

    def _next(self) -> bytes:
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error() or empty(mask):
            raise self._failed()
        return mask[: self._size].ljust(self._size, b"\0")

    def _failed(self) -> LlmcError:
        words = _first_line(self._matcher.get_error()) or "no token of the vocabulary continues the text"
        return LlmcError("E652", f"the grammar cannot go on: {words}", "ask for a simpler one, or for other texts")


def _definition(llguidance: Any, wanted: StructuredOutputsParams) -> str:
    """What was asked for in llguidance's own form."""
    if wanted.kind in ("json", "json_object"):
        schema = {"type": "object"} if wanted.json_object else json.loads(wanted.text)
        if wanted.disable_additional_properties:
            close_objects(schema)
        options: dict[str, Any] = {"whitespace_flexible": not wanted.disable_any_whitespace}
        if wanted.whitespace_pattern is not None:
            options["whitespace_pattern"] = wanted.whitespace_pattern
        return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    if wanted.kind == "choice":
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(wanted.text))
        return str(llguidance.LLMatcher.grammar_from_lark(f"start: {texts}"))
    return str(llguidance.grammar_from(wanted.kind, wanted.text))


def close_objects(schema: Any) -> None:
    """Forbid further properties, in place, in every object that names its properties and does not say what others are.

    An allOf of several parts keeps all objects open: its parts describe one object together, and closing each of them
    would exclude the properties of the others.
    """
    if '"allOf":' not in json.dumps(schema) or not _composed(schema):
        _close(schema)


def _composed(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_composed, schema))
    if not isinstance(schema, dict):
        return False
    parts = schema.get("allOf")
    together = isinstance(parts, list) and (len(parts) > 1 or "properties" in schema)
    return together or any(map(_composed, schema.values()))


def _close(schema: Any) -> None:
    if not isinstance(schema, dict):
        return
    if isinstance(schema.get("properties"), dict):
        schema.setdefault("additionalProperties", False)
    for key in _OF_NAMED_SCHEMAS:
        if isinstance(schema.get(key), dict):
            for part in schema[key].values():
                _close(part)
    for key in _OF_SCHEMAS:
        found = schema.get(key)
        for part in found if isinstance(found, list) else [found]:
            _close(part)


def _refused(wanted: StructuredOutputsParams, why: str) -> LlmcError:
    cause = f"structured_outputs: {wanted.kind} is refused: {_first_line(why)}"
    return LlmcError("E651", cause, "correct it, or ask for less")


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0][:200] if lines else ""
