"""Finds the logits of a program, which stay in its arena until the next step, and converts them to f32."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.program import Buffer, Program

_WIDTHS: Mapping[str, int] = MappingProxyType({"f32": 4, "bf16": 2, "f16": 2})


def find_logits(program: Program, vocab_size: int) -> int:
    """Return the index of the logits' buffer: the operand with a column per id in the launch of log-probabilities.

    Raises LlmcError E113 if there is none, or if a later launch overwrites it.
    """
    top = program.top()
    for at, launch in enumerate(program.launches):
        if any(program.buffers[i].name == "logprob" for i in launch.args):
            logits = next((i for i in launch.args if _is_logits(program.buffers[i], vocab_size, top)), None)
            later = {i for x in program.launches[at + 1 :] for i in x.args} - {logits}
            if logits is not None and not any(
                _overlap(program.buffers[logits], program.buffers[i], top) for i in later
            ):
                return logits
    cause = f"program {program.name} keeps no logits until the end of a step"
    raise LlmcError("E113", cause, "compile the model with this version of llmc")


def as_f32(data: np.ndarray, dtype: str) -> np.ndarray:
    """Convert the bytes of a float buffer, u8[n], to f32."""
    if dtype == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float32 if dtype == "f32" else np.float16).astype(np.float32)


def row_bytes(buffer: Buffer, vocab_size: int) -> int:
    """Return the size of one row of the logits in bytes."""
    return _WIDTHS[buffer.dtype] * vocab_size


def _is_logits(b: Buffer, vocab_size: int, top: Mapping[str, int]) -> bool:
    plain = b.kind == "arena" and b.alias is None and b.dtype in _WIDTHS and len(b.shape) == 2
    return plain and b.shape[1](top) == vocab_size and b.bytes(top) == b.shape[0](top) * row_bytes(b, vocab_size)


def _overlap(a: Buffer, b: Buffer, top: Mapping[str, int]) -> bool:
    """Whether two buffers share bytes of the arena."""
    return b.kind == "arena" and a.offset < b.offset + b.bytes(top) and b.offset < a.offset + a.bytes(top)
