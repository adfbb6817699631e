"""The PTX that converts codes of quantised weights; Python executes it, because the interpreter cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import pytest
from draw import generator

from llmc.codegen.backends.triton.kernels import float_codes as floats
from llmc.codegen.backends.triton.kernels import quantized_codes as codes
from llmc.ir.dtype import DTYPES
from llmc.ir.ops.quantize import VALUES

BF16 = DTYPES["bf16"].np


def permuted(a: int, b: int, selector: int) -> int:
    """prmt: four bytes of the eight of a and b; no digit of the selector copies a sign."""
    both = a | b << 32
    assert not selector & 0x8888
    return sum((both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def pairs(dtype: type, op: Callable[..., np.ndarray]) -> Callable[..., int]:
    """An operation on pairs of 16-bit floats, rounded once."""

    def run(*words: int) -> int:
        floats = [np.array([w], np.uint32).view(dtype).astype(np.float64) for w in words]
        return int(op(*floats).astype(dtype).view(np.uint32)[0])

    return run


INSTRUCTIONS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "mov.b32": lambda a: a,
        "and.b32": lambda a, b: a & b,
        "xor.b32": lambda a, b: a ^ b,
        "shr.u32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
        "prmt.b32": permuted,
        "fma.rn.bf16x2": pairs(BF16, lambda a, b, c: a * b + c),
        "fma.rn.f16x2": pairs(np.float16, lambda a, b, c: a * b + c),
        "add.rn.f16x2": pairs(np.float16, lambda a, b: a + b),
    }
)


def evaluate(ptx: str, outputs: int, inputs: list[int]) -> list[int]:
    """The output registers of inline PTX, whose operands are $0, $1, .. in order."""
    registers = {f"${outputs + i}": word for i, word in enumerate(inputs)}
    for statement in re.split(r"[;{}]", ptx):
        words = statement.replace(",", " ").split()
        if words and words[0] != ".reg":
            name, to, *values = words
            registers[to] = INSTRUCTIONS[name](*(registers[v] if v in registers else int(v, 0) for v in values))
    return [registers[f"${i}"] for i in range(outputs)]


def words_of(values: np.ndarray) -> list[int]:
    return [int(x) for x in np.ascontiguousarray(values).view(np.uint32)]


def drawn_bytes() -> np.ndarray:
    """All bytes, each in all four places of a word."""
    rng = generator()
    return np.concatenate([rng.permutation(256) for _ in range(16)]).astype(np.uint8).reshape(-1, 4)


@pytest.mark.parametrize(
    ("ptx", "dtype", "base"), ((codes.NIBBLES_BF16, BF16, 128), (codes.NIBBLES_F16, np.float16, 1024))
)
def test_nibbles_less_their_zero_points(ptx: object, dtype: type, base: int) -> None:
    for i, word in enumerate(drawn_bytes()):
        low_zero, high_zero = i % 16, (i // 16) % 16
        offsets = [words_of(np.full(4, -base - z).astype(dtype)) for z in (low_zero, high_zero)]
        found = evaluate(ptx.value, 4, [*words_of(word), *offsets[0], *offsets[1]])  # type: ignore[attr-defined]
        values = np.array(found, np.uint32).view(dtype).astype(int)
        assert values.tolist() == [*((word & 15).astype(int) - low_zero), *((word >> 4).astype(int) - high_zero)]


@pytest.mark.parametrize(("ptx", "dtype"), ((codes.BYTES_BF16, BF16), (codes.BYTES_F16, np.float16)))
def test_signed_bytes(ptx: object, dtype: type) -> None:
    for word in drawn_bytes():
        found = evaluate(ptx.value, 2, words_of(word))  # type: ignore[attr-defined]
        assert np.array(found, np.uint32).view(dtype).astype(int).tolist() == word.view(np.int8).tolist()


@pytest.mark.parametrize(("ptx", "dtype"), ((floats.E2M1_BF16, BF16), (floats.E2M1_F16, np.float16)))
def test_pairs_of_floats_of_four_bits(ptx: object, dtype: type) -> None:
    table = np.array(VALUES["e2m1"])
    for word in drawn_bytes():
        found = np.array(evaluate(ptx.value, 4, words_of(word)), np.uint32).view(dtype)  # type: ignore[attr-defined]
        want = table[np.concatenate([word & 15, word >> 4])]
        np.testing.assert_array_equal(found.view(np.uint16), want.astype(dtype).view(np.uint16))


@pytest.mark.parametrize(("ptx", "dtype"), ((floats.E4M3_BF16, BF16), (floats.E4M3_F16, np.float16)))
def test_floats_of_eight_bits(ptx: object, dtype: type) -> None:
    for word in drawn_bytes():
        word = np.where(word & 127 == 127, 0, word).astype(np.uint8)  # NaN
        found = np.array(evaluate(ptx.value, 2, words_of(word)), np.uint32).view(dtype)  # type: ignore[attr-defined]
        want = word.view(DTYPES["f8e4m3"].np).astype(np.float32).astype(dtype)
        np.testing.assert_array_equal(found.view(np.uint16), want.view(np.uint16))


def test_codes_in_float32() -> None:
    for word in drawn_bytes():
        found = np.array(evaluate(codes.NIBBLES_F32.value, 8, words_of(word)), np.uint32).view(np.float32)
        assert (found - 128).astype(int).tolist() == [*(word & 15), *(word >> 4)]
        found = np.array(evaluate(codes.BYTES_F32.value, 4, words_of(word)), np.uint32).view(np.float32)
        assert (found - 32896).tolist() == word.view(np.int8).tolist()


def test_products_of_pairs() -> None:
    a, b = generator().standard_normal((2, 64)).astype(BF16)
    for x, y in zip(words_of(a), words_of(b), strict=True):
        found = np.array(evaluate(codes.PRODUCT_BF16.value, 1, [x, y]), np.uint32).view(BF16)
        want = np.array([x], np.uint32).view(BF16) * np.array([y], np.uint32).view(BF16)
        assert found.tolist() == want.tolist()
