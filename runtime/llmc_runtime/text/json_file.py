"""Reads the JSON files of a tokenizer folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmc_runtime.format import tokenizer_files
from llmc_runtime.format.errors import LlmcError


def read_json(path: Path, missing: Any = None) -> Any:
    """Parse the JSON object in `path`; return `missing` if the file does not exist.

    Raises LlmcError E151 if the file is unreadable or is not an object.
    """
    try:
        value = tokenizer_files.document(path)
    except FileNotFoundError:
        return missing
    except (OSError, ValueError, RecursionError) as e:
        raise corrupt(path, e) from e
    if not isinstance(value, dict):
        raise corrupt(path, ValueError(f"expected an object, found {type(value).__name__}"))
    return value


def corrupt(path: Path, e: BaseException) -> LlmcError:
    """Return E151 for a file that cannot be read because of `e`."""
    remedy = "copy the file again from the model's folder and compile again"
    return LlmcError("E151", f"{path} cannot be read: {reason_of(e)}", remedy)


def reason_of(e: BaseException) -> str:
    """Return the first line of an exception's message, at most 200 characters, or its type's name."""
    lines = str(e).strip().splitlines()
    return (lines[0] if lines else type(e).__name__)[:200]
