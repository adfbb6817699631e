"""Weights for artifacts compiled with `--weights random:SEED`: finite, of usual magnitude, equal on all machines."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from types import MappingProxyType

import numpy as np

from llmc_runtime.format.dtypes import DTYPE_BITS

_PERIOD = (1 << 20) - 3  # a prime, so that no two rows of a matrix are equal and every token can be the most likely one
STD = 0.02
# Exponent biases: OCP 8-bit Floating Point Specification 1.0; AMD CDNA 3 (fnuz: 128 is NaN, and zero has no sign).
_BIASES: Mapping[str, int] = MappingProxyType({"f8e4m3": 7, "f8e4m3fnuz": 8})


class RandomWeights:
    """Generates tensors from a seed: vectors (norms) are ones, matrices follow N(0, 0.02).

    Tensors that `negative` names are -1. Integers of type i8 are codes of such matrices whose scale is 1/1600; other
    integers are random bits.
    """

    def __init__(self, seed: int, negative: Collection[str] = ()) -> None:
        self.seed = seed
        self.negative = negative
        rng = np.random.Generator(np.random.PCG64(seed))
        self._normal = (rng.standard_normal(_PERIOD, dtype=np.float32) * np.float32(STD)).clip(-3 * STD, 3 * STD)
        self._bits = rng.integers(0, 256, _PERIOD, dtype=np.uint8)
        self._tiles: dict[str, np.ndarray] = {}

    def tile(self, name: str, dtype: str, rank: int, nbytes: int) -> tuple[np.ndarray, int]:
        """Return a sequence u8[n] and an offset into it; the tensor's bytes repeat the sequence from that offset on.

        The offset depends on the name. Tensors of one dtype with more than one axis share the sequence, as the same
        array.
        """
        if rank < 2 or name in self.negative:
            ones = _encode(np.full(1, -1 if name in self.negative else 1, np.float32), dtype)
            return (np.zeros(max(1, nbytes), np.uint8) if ones is None else np.tile(ones, nbytes // len(ones))), 0
        if dtype not in self._tiles:
            encoded = _encode(self._normal, dtype)
            self._tiles[dtype] = self._bits if encoded is None else encoded
        tile = self._tiles[dtype]
        width = max(1, DTYPE_BITS[dtype] // 8)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return tile, int.from_bytes(digest[:4], "little") % (len(tile) // width) * width


def _encode(values: np.ndarray, dtype: str) -> np.ndarray | None:
    """Encode f32 values as bytes of a float dtype or of codes i8; None for other dtypes."""
    if dtype in _BIASES:
        return _encode_f8(values, _BIASES[dtype])
    if dtype == "i8":
        return np.rint(values * 1600).astype(np.int8).view(np.uint8)
    if dtype == "bf16":
        bits = values.view(np.uint32)
        # Round to nearest, ties to even.
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
    numpy_dtype = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(dtype)
    return None if numpy_dtype is None else np.ascontiguousarray(values.astype(numpy_dtype)).view(np.uint8)


def _encode_f8(values: np.ndarray, bias: int) -> np.ndarray:
    """Encode f32 values below 240 as floats of 8 bits with 3 bits of mantissa, rounded to nearest."""
    code = np.arange(127)
    exponent, fraction = code >> 3, code & 7
    size = np.where(exponent, (8 + fraction) * 2.0 ** (exponent - bias - 3), fraction * 2.0 ** (-bias - 2))
    size = size.astype(np.float32)
    nearest = np.searchsorted((size[1:] + size[:-1]) / 2, np.abs(values))
    signed = np.signbit(values) & ((nearest > 0) | (bias == _BIASES["f8e4m3"]))
    return (nearest | signed * 128).astype(np.uint8)
