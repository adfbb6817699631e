"""StructuredOutputsParams: the format that a request's text must have. Fields have vLLM's names."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.vllm_keywords import OF_STRUCTURED_OUTPUTS, KeywordChecks, known_keywords

MAX_BYTES = 64 << 10  # maximum bytes of a schema, expression or grammar, or of all choices together
MAX_CHOICES = 1024
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams(metaclass=KeywordChecks):
    """The format of a text: exactly one of the first six fields. Raises LlmcError E601 otherwise, or above a limit.

    json      a JSON schema, as a text or an object, up to 64 KiB;   json_object  True: any JSON object
    regex     a regular expression for the whole text (of Rust's regex syntax), up to 64 KiB
    choice    1 to 1024 texts, 64 KiB together
    grammar   in Lark's syntax or in GBNF, up to 64 KiB
    structural_tag  text of which parts follow grammars, in XGrammar's format (see grammar.structural_tag), as a JSON
              text or an object, up to 64 KiB
    disable_any_whitespace  JSON without white space between its parts;   whitespace_pattern  an expression for it
    disable_additional_properties  objects have no properties but those that the schema names
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Iterable[str] | None = None  # a tuple once constructed
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    text: str = field(default="", init=False, repr=False, compare=False)  # the value of the field as text

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            raise _refused(", ".join(kinds) or "nothing", f"exactly one of {', '.join(KINDS)}")
        if self.choice is not None:
            texts = () if isinstance(self.choice, str) else _texts(self.choice)
            if not 0 < len(texts) <= MAX_CHOICES or not all(isinstance(t, str) and t for t in texts):
                raise _refused("choice", f"1 to {MAX_CHOICES} texts, none of them empty")
            object.__setattr__(self, "choice", texts)
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool | None):
                raise _refused(name, f"{name} is true or false")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise _refused(name, f"{name} is a text")
        object.__setattr__(self, "text", self._text())
        size = len(self.text.encode(errors="replace")) + len(self.whitespace_pattern or "")
        if size > MAX_BYTES:
            raise _refused(f"{kinds[0]} of {size} bytes", f"up to {MAX_BYTES} bytes")

    @classmethod
    def without_unknown(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keywords that are fields. Raises LlmcError E648 or TypeError for others with an effect."""
        return known_keywords(cls, values, OF_STRUCTURED_OUTPUTS)

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    def _text(self) -> str:
        """The grammar as text: as it is, or a value as JSON. Raises LlmcError E601 if it is too large."""
        value = getattr(self, self.kind)
        if is_over(value, MAX_BYTES):
            raise _refused(f"{self.kind} of more than {MAX_BYTES} bytes", f"up to {MAX_BYTES} bytes")
        if isinstance(value, str):
            return value
        try:
            return jsonlib.dumps({} if self.json_object else value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as e:
            raise _refused(self.kind, f"values that JSON can hold ({str(e)[:80]})") from None


def is_over(value: Any, max_bytes: int) -> bool:
    """Whether the JSON of a value is certainly longer than `max_bytes`.

    It returns as soon as that is known, so the time is bounded by `max_bytes`, not by the value.
    """
    level: list[Any] = [value]
    remaining = max_bytes
    while level:
        maps = [item for item in level if type(item) is dict]
        lists = [item for item in level if type(item) is list or type(item) is tuple]
        remaining -= 4 * sum(map(len, maps)) + 2 * sum(map(len, lists))  # punctuation and a character for each value
        remaining -= sum(map(len, [item for item in level if type(item) is str]))
        if remaining < 0:
            return True
        remaining -= sum(map(len, [key for item in maps for key in item if type(key) is str]))
        level = list(chain(chain.from_iterable(map(dict.values, maps)), chain.from_iterable(lists)))
    return remaining < 0


def _texts(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping) else ()


def _refused(value: str, allowed: str) -> LlmcError:
    name = "structured_outputs"
    return LlmcError("E601", f"{name} = {value} is not allowed", f"{name}: {allowed}", name)
