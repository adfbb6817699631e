"""How sampling goes where nobody says: a model's generation_config.json, or what was put in its place; no requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.sampling_params import PARAMETERS, SamplingParams

AUTO, NEUTRAL = "auto", "vllm"
_FILE = "generation_config.json"
_OF_MODEL = tuple(one.name for one in PARAMETERS.values() if one.of_model)
_SAMPLES = frozenset(one.name for one in PARAMETERS.values() if one.of_model == "sampling")  # if do_sample is true
KEYS = ("do_sample", *_OF_MODEL, "max_new_tokens")
_MOST = 1 << 20  # characters of a file


def generation_of(
    model: Mapping[str, Any], config: str | None = AUTO, override: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """What counts: `model` is its own file's contents; `config`: "auto" (these), "vllm" (none of them) or a folder with
    another file; `override` goes over that, and samples (do_sample) where it says how. LlmcError E612 where a file
    cannot be used, a key of `override` is unknown, or a value makes no sense."""
    found = dict(model) if config in (None, AUTO) else {} if config == NEUTRAL else _of_folder(Path(str(config)))
    if override:
        unknown = sorted(set(override) - set(KEYS))
        if unknown:
            cause = f"override_generation_config: {unknown[0][:60]!r} is none of its keys"
            raise LlmcError("E612", cause, ", ".join(KEYS))
        samples = {"do_sample": True} if set(override) & set(_SAMPLES) else {}
        found |= samples | dict(override)
    if override or config not in (None, AUTO):
        try:
            default_params(found)
        except LlmcError as e:
            raise LlmcError("E612", e.cause.replace(_FILE, "sampling defaults"), "values as in docs/running.md") from e
    return found


def default_params(generation: Mapping[str, Any], *, max_tokens: int | None = 16) -> SamplingParams:
    """What a model's generation_config.json asks for, as transformers reads it: greedy unless it says do_sample.

    `max_tokens` stands where the file names no max_new_tokens. LlmcError E601 where a value makes no sense.
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
            remedy = "pass sampling_params, or mend the file and compile again"
            raise LlmcError(e.code, f"{_FILE}: {e.cause}", remedy) from e
    return params


def of_model(generation: Mapping[str, Any]) -> list[str]:
    """The parameters whose defaults this generation_config.json sets: those of the draw only if it says do_sample."""
    return [name for name in _OF_MODEL if name not in _SAMPLES or generation.get("do_sample")]


def described(generation: Mapping[str, Any], config: str | None, override: Mapping[str, Any] | None) -> str | None:
    """A line for the person who starts a command: which defaults there are, and how to be rid of them. None where there
    are none."""
    names = [name for name in KEYS[1:] if generation.get(name) is not None]
    told = [f"{name} {generation[name]}" for name in names if name not in _SAMPLES or generation.get("do_sample")]
    if not told:
        return None
    own = f"the model's {_FILE}" if config in (None, AUTO) else f"{config}/{_FILE}"
    sources = [own] * (config != NEUTRAL and not set(names) <= set(override or ()))
    sources += ["--override-generation-config"] * bool(override)
    rid = "" if config == NEUTRAL else f"; --generation-config {NEUTRAL} leaves out the model's"
    return f"sampling where a request leaves it open: {', '.join(told)} (of {' and '.join(sources)}{rid})"


def parse_override(text: str) -> dict[str, Any]:
    """A JSON object of a command line. ValueError where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError('it is no JSON object, such as {"temperature": 0.7}')
    return found


def _of_folder(folder: Path) -> dict[str, Any]:
    try:
        with (folder / _FILE).open(encoding="utf-8") as file:
            found = parse_override(file.read(_MOST))
    except (OSError, ValueError) as e:
        words = e.strerror if isinstance(e, OSError) else e
        remedy = f"{AUTO}, {NEUTRAL}, or a folder with a {_FILE}"
        raise LlmcError("E612", f"--generation-config {folder}: {_FILE} cannot be read: {words}", remedy) from e
    return {name: found[name] for name in KEYS if found.get(name) is not None}
