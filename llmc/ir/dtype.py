"""Storage dtypes: name, width in bits, kind, numpy counterpart, and type promotion."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

FLOATS = ("f32", "bf16", "f16")  # float dtypes in which kernels compute
INTS = ("i64", "i32", "i16", "i8", "u32", "u16", "u8")


@dataclass(frozen=True)
class DType:
    """A storage dtype. `kind` is f (float), i (integer) or b (bool); `numpy` is its name in numpy or ml_dtypes."""

    name: str
    bits: int
    kind: str
    numpy: str
    rank: int = 0

    @property
    def np(self) -> np.dtype:
        """The numpy dtype."""
        return _numpy(self.numpy)

    @property
    def largest(self) -> float:
        """The largest finite number of a float dtype."""
        import ml_dtypes

        return float(ml_dtypes.finfo(self.np).max)


@lru_cache(maxsize=64)
def _numpy(name: str) -> np.dtype:
    if hasattr(np, name):
        return np.dtype(getattr(np, name))
    import ml_dtypes  # provides the formats that numpy lacks

    return np.dtype(getattr(ml_dtypes, name))


# `rank` orders promotion within a kind: the higher wins. Equal ranks (bf16 and f16) promote to f32.
DTYPES = MappingProxyType(
    {
        d.name: d
        for d in (
            DType("f64", 64, "f", "float64", 5),
            DType("f32", 32, "f", "float32", 4),
            DType("bf16", 16, "f", "bfloat16", 3),
            DType("f16", 16, "f", "float16", 3),
            DType("f8e4m3", 8, "f", "float8_e4m3fn", 2),
            DType("f8e4m3fnuz", 8, "f", "float8_e4m3fnuz", 2),
            DType("f8e5m2", 8, "f", "float8_e5m2", 2),
            DType("f8e8m0", 8, "f", "float8_e8m0fnu", 1),
            DType("f4e2m1", 4, "f", "float4_e2m1fn", 0),
            DType("i64", 64, "i", "int64", 8),
            DType("i32", 32, "i", "int32", 6),
            DType("u32", 32, "i", "uint32", 7),
            DType("i16", 16, "i", "int16", 4),
            DType("u16", 16, "i", "uint16", 5),
            DType("i8", 8, "i", "int8", 2),
            DType("u8", 8, "i", "uint8", 3),
            DType("i4", 4, "i", "int4", 0),
            DType("u4", 4, "i", "uint4", 1),
            DType("bool", 8, "b", "bool_", 0),
        )
    }
)


def promote(a: str, b: str) -> str:
    """Return the result dtype of a pointwise op: bool < integer < float, and the wider within a kind."""
    if a == b:
        return a
    x, y = DTYPES[a], DTYPES[b]
    if x.kind != y.kind:
        order = "bif"
        return a if order.index(x.kind) > order.index(y.kind) else b
    if x.rank == y.rank:
        return "f32" if x.kind == "f" else "i32"
    return a if x.rank > y.rank else b
