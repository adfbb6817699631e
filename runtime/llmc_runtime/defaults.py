"""Sampling defaults: the model's generation_config.json, or the values that options replace it with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.option_type import malformed
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams

AUTO, NEUTRAL = "auto", "vllm"
_FILE = "generation_config.json"
_OF_MODEL = tuple(name for name, parameter in PARAMETERS.items() if parameter.model_default)
# Of these, the ones that a model sets only if its do_sample is true.
_SAMPLES = frozenset(name for name in _OF_MODEL if PARAMETERS[name].model_default == "sampling")
KEYS = ("do_sample", *_OF_MODEL, "max_new_tokens")
_MAX_SIZE = 1 << 20  # characters of a generation_config.json


def generation_of(
    model: Mapping[str, Any], config: str | None = AUTO, override: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """Return the sampling defaults, by their names in generation_config.json.

    model:     the contents of the model's own file
    config:    "auto" (the model's), "vllm" (none), or a folder with another file
    override:  replaces some of them; do_sample is set if it has sampling parameters

    Raises LlmcError E612 if a file cannot be read, a key of `override` is unknown, or a value is not allowed.
    """
    if config in (None, AUTO):
        values = dict(model)
    else:
        values = {} if config == NEUTRAL else _of_folder(Path(str(config)))
    if override:
        unknown = sorted(set(override) - set(KEYS))
        if unknown:
            cause = f"override_generation_config: {unknown[0][:60]!r} is not one of its keys"
            raise LlmcError("E612", cause, f"use {', '.join(KEYS)}")
        samples = {"do_sample": True} if set(override) & set(_SAMPLES) else {}
        values |= samples | dict(override)
    if override or config not in (None, AUTO):
        try:
            default_params(values)
        except LlmcError as e:
            cause = e.cause.replace(_FILE, "sampling defaults")
            raise LlmcError("E612", cause, "use values that docs/running.md lists") from e
    return values


def default_params(generation: Mapping[str, Any], *, max_tokens: int | None = 16) -> SamplingParams:
    """Return the parameters of a generation_config.json as transformers reads it: greedy unless do_sample is set.

    `max_tokens` is used if there is no max_new_tokens. Raises LlmcError E601 for a value that is not allowed.
    """
    length = generation.get("max_new_tokens")
    params = SamplingParams(max_tokens=length if type(length) is int and length > 0 else max_tokens)
    if not generation.get("do_sample"):
        params = replace(params, temperature=0.0)
    for name in of_model(generation):
        value = generation.get(name)
        if value is None:
            continue
        try:
            params = replace(params, **{name: value})
        except LlmcError as e:
            remedy = "pass sampling_params, or correct the file and compile again"
            raise LlmcError(e.code, f"{_FILE}: {e.cause}", remedy) from e
    return params


def of_model(generation: Mapping[str, Any]) -> list[str]:
    """Return the names of the parameters whose defaults it sets; sampling parameters only with do_sample."""
    return [name for name in _OF_MODEL if name not in _SAMPLES or generation.get("do_sample")]


def described(generation: Mapping[str, Any], config: str | None, override: Mapping[str, Any] | None) -> str | None:
    """Return a log line that lists the sampling defaults and how to disable them; None if there are none."""
    names = [name for name in KEYS[1:] if generation.get(name) is not None]
    texts = [f"{name} {generation[name]}" for name in names if name not in _SAMPLES or generation.get("do_sample")]
    if not texts:
        return None
    source = f"the model's {_FILE}" if config in (None, AUTO) else f"{config}/{_FILE}"
    sources = [source] * (config != NEUTRAL and not set(names) <= set(override or ()))
    sources += ["--override-generation-config"] * bool(override)
    disable = "" if config == NEUTRAL else f"; --generation-config {NEUTRAL} ignores them"
    return f"sampling defaults: {', '.join(texts)} (from {' and '.join(sources)}{disable})"


def parse_override(text: str) -> dict[str, Any]:
    """Parse a JSON object from a command line. Raises argparse.ArgumentTypeError if it is not one."""
    if (values := json_object(text)) is None:
        raise malformed(_not_an_object(text))
    return values


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is not one."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _not_an_object(text: str) -> str:
    return f'{text[:60]!r} is not a JSON object, such as {{"NAME": 0.7}}'


def _of_folder(folder: Path) -> dict[str, Any]:
    try:
        with (folder / _FILE).open(encoding="utf-8") as file:
            text = file.read(_MAX_SIZE)
        if (values := json_object(text)) is None:
            raise ValueError(_not_an_object(text))
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else e
        remedy = f"use {AUTO}, {NEUTRAL}, or a folder with a {_FILE}"
        raise LlmcError("E612", f"--generation-config {folder}: {_FILE} cannot be read: {reason}", remedy) from e
    return {name: values[name] for name in KEYS if values.get(name) is not None}
