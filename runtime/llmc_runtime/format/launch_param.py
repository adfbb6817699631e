"""The parameters and tensor maps that a kernel launch passes, as data; parsing and validation."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from llmc_runtime.format import expr
from llmc_runtime.format.expr import Expr
from llmc_runtime.format.json_fields import Fields, damaged
from llmc_runtime.format.record import Record, stored

ZERO = expr.of(0)
# Types of numbers, as `struct` names them.
TYPES: Mapping[str, str] = MappingProxyType({"i32": "<i", "i64": "<q", "f32": "<f", "u8": "<B"})
# Dtypes supported in tensor maps, and the size of an element in bytes.
MAPPED: Mapping[str, int] = MappingProxyType({"bf16": 2, "f16": 2, "f8e4m3": 1, "i8": 1})
# The kinds of parameters, and their keys in JSON.
_KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "arg": ("arg", "offset"),
        "tensor": ("tensor", "offset", "size"),
        "map": ("map",),
        "size": ("size", "type"),
        "value": ("value", "type"),
    }
)
MAX_BOX = 256  # maximum elements along an axis of a box
MAX_AXIS = (1 << 31) - 1  # maximum elements along an axis of a mapped tensor: kernels receive its sizes as i32
_MAX_STRIDE = 1 << 40  # bytes, exclusive
_ROW_BYTES = 16  # bytes; rows of mapped tensors and of boxes, and addresses, are multiples of this


def a_size(value: Any, where: str) -> Expr:
    """Read a size expression from parsed JSON: a string or a plain integer. Raises LlmcError E103 or E108."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise damaged(where, "must be a size expression")
    return expr.of(value)


@dataclass(frozen=True)
class Param(Record):
    """One parameter of a launch, by `kind`:

    - "arg": the address of the launch's argument number `index` plus `offset` bytes (a size expression, evaluated at
      the upper bounds of the symbols);
    - "tensor": 16 bytes, of which the first 8 are the same address, the next 4 the value of `size` in this step;
    - "map": the 128 bytes of its tensor map number `index`;
    - "size": the value of `size` in this step, of `type` i32 or i64;
    - "value": the number `value`, of `type` i32, i64, f32 or u8.
    """

    interned = True

    kind: str
    index: int = 0
    size: Expr | None = None
    value: int | float = 0
    type: str = ""
    offset: Expr = ZERO

    @property
    def bits(self) -> int:
        """The bytes of a "value" as a little-endian unsigned integer."""
        return int.from_bytes(struct.pack(TYPES[self.type], self.value), "little")

    @classmethod
    def _read(cls, value: Any, where: str, lenient: bool) -> Self:
        """Read a parameter from parsed JSON; raise LlmcError E103 if its kind is unknown or its value does not fit."""
        f = Fields(value, where, lenient)
        kind = next((k for k in _KEYS if k in value), "")
        more: dict[str, Any] = {}
        if kind in ("arg", "tensor", "map"):
            more["index"] = f.integer(kind, high=4096)
        elif kind in ("size", "value"):
            more[kind] = a_size(f.get(kind), where) if kind == "size" else f.get(kind)
            more["type"] = f.text("type")
        else:
            raise damaged(where, "a parameter is an arg, a tensor, a map, a size or a value")
        if kind in ("arg", "tensor") and "offset" in value:
            more["offset"] = f.item("offset", a_size)
        if kind == "tensor":
            more["size"] = a_size(f.get("size"), where)
        f.close(_KEYS[kind])
        param = cls(kind, **more)
        param.validate(where)
        return param

    def validate(self, where: str) -> None:
        """Raise LlmcError E103 if the type is unknown or the number does not fit it."""
        if self.kind in ("arg", "tensor", "map"):
            return
        if self.type not in TYPES or (self.kind == "size" and self.type not in ("i32", "i64")):
            raise damaged(where, f"a {self.kind} cannot have type {self.type[:20]!r}")
        try:
            if self.kind == "value" and isinstance(self.value, bool):
                raise ValueError("it is not a number")
            _ = self.bits
        except (struct.error, OverflowError, ValueError) as e:
            raise damaged(where, f"the value does not fit {self.type}: {str(e)[:80]}") from None

    def json(self) -> dict[str, Any]:
        """Return the parameter as JSON values."""
        if self.kind in ("arg", "tensor", "map"):
            size = {} if self.size is None else {"size": str(self.size)}
            return {self.kind: self.index, **size, **({} if self.offset == ZERO else {"offset": str(self.offset)})}
        return {self.kind: str(self.size) if self.kind == "size" else self.value, "type": self.type}


@dataclass(frozen=True)
class TensorMap(Record):
    """An argument of a launch that is passed as a tensor map (CUtensorMap) instead of a pointer.

    `arg` is an index into `Launch.args`. The tensor has 2 to 5 axes of the sizes `shape` and starts `offset` bytes
    after the start of the buffer. `strides` are in elements, one for every axis except the last, whose elements are
    adjacent; empty means row-major. All of these are evaluated at the upper bound of every symbol, except that symbols
    of states, such as the number of pages, have the values for which the states were allocated. The tensor is copied in
    pieces of shape `box`. `swizzle` is a CUtensorMapSwizzle, 0 to 3.
    """

    interned = True

    arg: int = stored(Fields.integer, high=4096)
    shape: tuple[Expr, ...] = stored(Fields.list, item=a_size, cap=5)
    box: tuple[int, ...] = stored(Fields.integers, cap=5)
    swizzle: int = stored(Fields.integer, high=3)
    strides: tuple[Expr, ...] = stored(Fields.list, (), omitted=True, item=a_size, cap=4)
    offset: Expr = stored(Fields.item, ZERO, omitted=True, item=a_size)

    def layout(self, env: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """Return the sizes and the strides, in elements, of all axes, with the symbols' values from `env`."""
        shape = [d(env) for d in self.shape]
        strides = [s(env) for s in self.strides] or [math.prod(shape[i:]) for i in range(1, len(shape))]
        return shape, [*strides, 1]

    def validate(self, where: str) -> None:
        """See Record."""
        if not 2 <= len(self.shape) == len(self.box) or not all(0 < b <= MAX_BOX for b in self.box):
            raise damaged(where, f"a box needs one size per axis of its tensor, at least two, each 1 to {MAX_BOX}")
        if len(self.strides) not in (0, len(self.shape) - 1):
            raise damaged(where, "a tensor map needs one stride per axis except the last, or none at all")

    def check(self, dtype: str, begin: int, nbytes: int, top: Mapping[str, int], path: str) -> None:
        """Check that the driver will accept the map, and that its tensor lies inside its buffer at every step.

        `dtype` is the buffer's. `begin` is the offset of its memory, and `nbytes` its size at the symbols' upper bounds
        `top`, both in bytes. Raises LlmcError E103.
        """
        (shape, strides), offset = self.layout(top), self.offset(top)
        size = MAPPED.get(dtype)
        if size is None:
            raise damaged(path, f"a tensor map of {dtype}; the dtypes {', '.join(MAPPED)} are supported")
        row = self.box[-1] * size
        if row % _ROW_BYTES or (self.swizzle and row > _ROW_BYTES << self.swizzle):
            raise damaged(
                path, f"a box has rows of {row} bytes: not a multiple of {_ROW_BYTES}, or too wide for its swizzle"
            )
        if not all(0 < d <= MAX_AXIS for d in shape):
            raise damaged(path, f"an axis of a tensor map's tensor is empty or larger than {MAX_AXIS}")
        if not all(0 < s * size < _MAX_STRIDE for s in strides) or offset < 0:
            raise damaged(path, "a tensor map has a stride or an offset out of range")
        end = offset + size * (1 + sum((d - 1) * s for d, s in zip(shape, strides)))
        if end > nbytes:
            raise damaged(path, "the tensor of a tensor map is not inside its buffer")
        if any(s * size % _ROW_BYTES for s in strides[:-1]) or (begin + offset) % _ROW_BYTES:
            raise damaged(path, f"the rows or the start of a tensor map are not multiples of {_ROW_BYTES} bytes")
