"""Parses a request body into a checked object: JSON, its depth, types, lengths, and unknown fields.

Ranges are checked where values are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from llmc_runtime.server.http.errors import ApiError, not_found, unsupported

MAX_DEPTH = 64
SMALL_BODY = 32 << 10  # maximum bytes of a body that is parsed in the event loop
SMALL_TEXT = 8 << 10  # this maximum if the response contains a value for each token of the body
OF_ITEMS, OF_CHARACTERS = ("maxItems", "maxProperties"), "maxLength"  # keywords of JSON schema
_SMALL_CONTAINERS = 1500  # maximum number of objects and lists in such a body
_MAX_NAMED = 3  # names of the model that an error lists
_MAX_INTEGER = 2.0**63  # floats beyond it are not converted to integers
# Known fields that have no effect here.
_IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity",
        "request_id", "session_id", "spaces_between_special_tokens", "stream_interval", "length_penalty",
        "prediction", "mm_processor_kwargs", "media_io_kwargs",
    }
)  # fmt: skip
# Known fields that are rejected if they are set: ignoring them would change the response.
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "tools": "use /v1/chat/completions", "functions": "use tools", "function_call": "use tool_choice",
        "suffix": "omit it, as text is only appended to a prompt", "audio": "omit it, as only text is generated",
        "web_search_options": "omit it, as the server has no access to the web",
        "prompt_embeds": "send text or token ids",
        "vllm_xargs": "omit it, as the server has no such extensions",
        "watermarking": "omit it, as the server marks no text",
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), "omit it, as KV pages are not exchanged"),
        "return_prompt_text": "use /tokenize with return_token_strs, or return_token_ids",
        "thinking_token_budget": "use max_tokens",
        "guided_decoding_backend": "omit it, as grammars are compiled by llguidance",
        "use_beam_search": "use n", "logits_processors": "use logit_bias or allowed_token_ids",
        "truncate_prompt_tokens": "shorten the prompt",
        "truncation_side": "omit it, as tokens are dropped at the end of an input, if at all",
        "chat_template": "omit it, as the server's own template is used",
        **dict.fromkeys(("echo", "prompt_logprobs"), "use /v1/completions"), "documents": "use /v1/chat/completions",
        "moderation": "omit it, as text is not classified", "repetition_detection": "use repetition_penalty",
        "structural_tag": "use structured_outputs", "logprob_token_ids": "use logprobs",
        # Fields of other servers, or of vLLM's Python API.
        **dict.fromkeys(("thinking", "enable_thinking"), "use chat_template_kwargs, or reasoning_effort"),
        "reasoning": "use reasoning_effort", "do_sample": "use temperature; 0 is greedy",
        **dict.fromkeys(("max_new_tokens", "n_predict"), "use max_tokens"),
        **dict.fromkeys(("regex", "ebnf", "grammar", "json_schema"), "use structured_outputs or response_format"),
        "stop_regex": "use stop", "repeat_penalty": "use repetition_penalty",
        **dict.fromkeys(("num_beams", "beam_width"), "use n"),
        **dict.fromkeys(("lora_request", "lora_path", "adapter_id"), "merge the adapter into the weights, and compile"),
        **dict.fromkeys(
            ("typical_p", "top_a", "tfs_z", "mirostat", "dry_multiplier", "xtc_probability", "no_repeat_ngram_size"),
            "use temperature, top_p, top_k, min_p and penalties",
        ),
        "custom_logit_processor": "use logit_bias or allowed_token_ids", "return_hidden_states": "use /v1/embeddings",
    }
)  # fmt: skip
# Refused fields for which false and empty values have a meaning, too.
_ANY_VALUE = frozenset({"web_search_options", "thinking", "enable_thinking", "do_sample", "lora_request"})
# Values of refused fields that have no effect.
_NO_EFFECT = (
    ("function_call", "none"), ("function_call", "auto"), ("n", 1), ("best_of", 1), ("top_logprobs", 0),
    ("do_sample", True), ("num_beams", 1), ("beam_width", 1), ("typical_p", 1), ("tfs_z", 1), ("repeat_penalty", 1),
    *((name, 0) for name in ("top_a", "mirostat", "dry_multiplier", "xtc_probability", "no_repeat_ngram_size")),
    ("truncation_side", "right"), ("embed_dtype", "float32"), ("endianness", "little"), ("endianness", "native"),
    *(("guided_decoding_backend", name) for name in ("auto", "guidance", "xgrammar")),
)  # fmt: skip
_BOM = b"\xef\xbb\xbf"  # some editors and shells write it at the start

T = TypeVar("T", bound=msgspec.Struct)


@cache
def limits_of(kind: type[msgspec.Struct], *keywords: str) -> Mapping[str, int]:
    """Return the values of these JSON schema keywords in a type of request, by the field's path."""
    _, components = msgspec.json.schema_components([kind], ref_template="{name}")

    def walk(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, int]]:
        schema = components[schema["$ref"]] if "$ref" in schema else schema
        yield from ((path, schema[keyword]) for keyword in keywords if keyword in schema)
        for option in schema.get("anyOf", ()):
            yield from walk({**option, "anyOf": ()}, path)
        for name, field in schema.get("properties", {}).items():
            yield from walk(field, f"{path}.{name}" if path else name)

    return MappingProxyType(dict(walk(components[kind.__name__], "")))


def is_large(body: bytes | bytearray, small: int) -> bool:
    """Return whether parsing a body could block the event loop: it has more than `small` bytes, or many containers."""
    return len(body) > small or body.count(b"{") + body.count(b"[") > _SMALL_CONTAINERS


def parse(body: bytes | bytearray, kind: type[T], unknown: Callable[[int], None]) -> T:
    """Parse the body as a `kind`. `unknown` is called with the number of unknown fields.

    The class attribute `refused` of a kind maps further names of unsupported fields to remedies, and `ignored` has
    those of fields without an effect. Raises ApiError 400, naming the field.
    """
    fields = document(body)
    known, refused = kind.__struct_fields__, {**_REFUSED, **getattr(kind, "refused", {})}
    ignored = _IGNORED | getattr(kind, "ignored", frozenset())
    unknown(len(fields.keys() - set(known) - ignored - refused.keys() - {"tool_choice", "modalities"}))
    _refuse_unsupported(fields, known, refused)
    check_lengths({name: fields[name] for name in known if name in fields}, kind)
    values = {name: _with_integers(fields[name]) for name in known if fields.get(name) is not None}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as e:
        message, _, path = str(e).partition(" - at `$.")
        missing = message.partition("missing required field `")[2]
        param = path.rstrip("`") or missing.rstrip("`") or None
        raise ApiError(f"{param}: {message}" if path else message, param=param, code="invalid_type") from None


def _refuse_unsupported(fields: Mapping[str, Any], known: Sequence[str], refused: Mapping[str, str]) -> None:
    """Raise ApiError 400 for a field of `refused` (name -> remedy) that is not `known` and would have an effect."""
    for name, remedy in refused.items():
        value = fields.get(name)
        used = value is not None if name in _ANY_VALUE else _is_set(value)
        if name not in known and used and (name, value) not in _NO_EFFECT:
            raise unsupported(f"{name} is not supported: {remedy}", name)
    if "tool_choice" not in known and fields.get("tool_choice") not in (None, "none", "auto"):
        raise unsupported("tool_choice is not supported: use /v1/chat/completions", "tool_choice")
    if fields.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities: only text is generated", "modalities")


def _is_set(value: Any) -> bool:
    """Return whether a field has a value: not null, false, or empty. Zero is a value."""
    return bool(value) or (isinstance(value, int | float) and value is not False)


def check_lengths(fields: Mapping[str, Any], kind: type[msgspec.Struct]) -> None:
    """Raise ApiError 400 if a value is longer than the type of the request allows.

    This takes constant time, as only the lengths of lists, objects and strings are read.
    """
    for path, limit in limits_of(kind, *OF_ITEMS).items():
        value = _at(fields, path)
        if isinstance(value, list | dict) and len(value) > limit:
            raise ApiError(f"{path}: up to {limit}, not {len(value)}", param=path)
    for path, limit in limits_of(kind, OF_CHARACTERS).items():
        value = _at(fields, path)
        if isinstance(value, str) and len(value) > limit:
            raise ApiError(f"{path}: up to {limit} characters, not {len(value)}", param=path)


def _at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = fields
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def check_model(name: str | None, served: tuple[str, ...] | list[str]) -> None:
    """Raise ApiError 404 if the model is not served here. No name means the default model."""
    if name and name not in served:
        others = ", ".join(other[:80] for other in served[:_MAX_NAMED]) + (", ..." if len(served) > _MAX_NAMED else "")
        cause = f"the model {name[:80]!r} is not served here. Try: {others}"
        raise not_found(cause, "model", "model_not_found")


def document(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object of a body. Raises ApiError 400 if it is not one, or nested deeper than MAX_DEPTH."""
    try:
        value = msgspec.json.decode(body.removeprefix(_BOM))
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeError) as e:
        utf16 = body[:2] in (b"\xff\xfe", b"\xfe\xff")
        reason = "it is not UTF-8" if isinstance(e, UnicodeError) or utf16 else str(e)[:120]
        reason = reason if body else "it is empty"
        raise ApiError(f"the body cannot be read as JSON: {reason}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError("the body is not a JSON object; send the fields of the request as one", code="invalid_json")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH:  # otherwise it cannot be too deep
        _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        parts = [part.values() if isinstance(part, dict) else part for part in level]
        level = [item for part in parts for item in part if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(f"the body is nested deeper than {MAX_DEPTH} levels; send flatter values", code="invalid_json")


def _with_integers(value: Any) -> Any:
    """Convert whole floats to integers, also in a list: JSON has only one type of number."""
    if type(value) is float and value.is_integer() and abs(value) < _MAX_INTEGER:
        return int(value)
    if type(value) is list and float in set(map(type, value)):
        return list(map(_with_integers, value))
    return value
