"""A request's body becomes a checked object: JSON, its depth, types, sizes, and fields that nobody knows; no ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from llmc_runtime.server.http.errors import ApiError
from llmc_runtime.server.requests.field_limits import check_lengths

MAX_DEPTH = 64
SMALL_BODY = 32 << 10  # bytes of a body that is read in the event loop, at most
SMALL_TEXT = 8 << 10  # and where the answer has a value for each token of it
_SMALL_CONTAINERS = 1500  # objects and lists of such a body
_WHOLE = 2.0**63  # what is over is no integer that a field could have
# Known, and of no effect here.
_IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity",
        "request_id", "spaces_between_special_tokens",
    }
)  # fmt: skip
_USE = "use structured_outputs"
# Known, and refused where they ask for something: an answer that passes over them would be another answer.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "tools": "they are of /v1/chat/completions", "functions": "use tools",
        "function_call": "use tool_choice",
        "suffix": "this version does not fill in", "audio": "models here are of text alone",
        "web_search_options": "this server fetches nothing", "prompt_embeds": "give text or token ids",
        "guided_json": _USE, "guided_regex": _USE, "guided_choice": _USE, "guided_grammar": _USE,
        "use_beam_search": "use n", "logits_processors": "use logit_bias or allowed_token_ids",
        "truncate_prompt_tokens": "shorten the prompt", "chat_template": "the server's own template is used",
    }
)  # fmt: skip

_NO_CALLS = (("function_call", "none"), ("function_call", "auto"))  # without functions they ask for nothing
_BOM = b"\xef\xbb\xbf"  # in front of what some editors and shells write

T = TypeVar("T", bound=msgspec.Struct)


def is_large(body: bytes | bytearray, small: int) -> bool:
    """Whether reading a body could hold the event loop: it has more than `small` bytes, or many objects and lists."""
    return len(body) > small or body.count(b"{") + body.count(b"[") > _SMALL_CONTAINERS


def parse(body: bytes | bytearray, kind: type[T], unknown: Callable[[int], None]) -> T:
    """The body as a `kind`; `unknown` is told how many fields of it nobody knows. ApiError 400 names what is wrong."""
    fields = document(body)
    known = kind.__struct_fields__
    unknown(len(fields.keys() - set(known) - _IGNORED - _REFUSED.keys() - {"tool_choice", "modalities"}))
    for name, remedy in _REFUSED.items():
        if fields.get(name) and name not in known and (name, fields[name]) not in _NO_CALLS:
            raise ApiError(f"{name} is not supported: {remedy}", param=name, code="unsupported_parameter")
    if "tool_choice" not in known and fields.get("tool_choice") not in (None, "none", "auto"):
        cause = "tool_choice is not supported: tools are of /v1/chat/completions"
        raise ApiError(cause, param="tool_choice", code="unsupported_parameter")
    if fields.get("modalities") not in (None, ["text"]):
        raise ApiError("modalities: models here are of text alone", param="modalities", code="unsupported_parameter")
    check_lengths({name: fields[name] for name in known if name in fields})
    given = {name: _whole(fields[name]) for name in known if fields.get(name) is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as e:
        words, _, path = str(e).partition(" - at `$.")
        param = path.rstrip("`") or _missing(words)
        raise ApiError(f"{param}: {words}" if path else words, param=param, code="invalid_type") from None


def document(body: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a body. ApiError 400 where it is none, or nested deeper than MAX_DEPTH."""
    try:
        value = msgspec.json.decode(body.removeprefix(_BOM))
    except RecursionError:
        raise _deep() from None
    except (msgspec.MsgspecError, UnicodeError) as e:
        words = "it is not UTF-8" if isinstance(e, UnicodeError) or _utf16(body) else str(e)[:120]
        raise ApiError(f"the body cannot be read as JSON: {words}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError("the body is not a JSON object", code="invalid_json")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:  # else it cannot be
        _check_depth(value)
    return value


def _utf16(body: bytes | bytearray) -> bool:
    return body[:2] in (b"\xff\xfe", b"\xfe\xff")


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [one for part in parts for one in part if isinstance(one, dict | list)]
        if not level:
            return
    raise _deep()


def _deep() -> ApiError:
    return ApiError(f"the body is nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is 3, and so in a list."""
    if type(value) is float and value.is_integer() and abs(value) < _WHOLE:
        return int(value)
    if type(value) is list and float in set(map(type, value)):
        return list(map(_whole, value))
    return value


def _missing(words: str) -> str | None:
    _head, _, name = words.partition("missing required field `")
    return name.rstrip("`") if name else None
