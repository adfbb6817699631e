"""One parameter of a kernel launch as data, and size text as a field; reading and checking them, never passing them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmc_runtime.format import expr
from llmc_runtime.format.expr import Expr
from llmc_runtime.format.json_fields import Fields, damaged

TYPES: Mapping[str, str] = MappingProxyType({"i32": "<i", "i64": "<q", "f32": "<f"})  # as `struct` names them


def a_size(value: Any, where: str) -> Expr:
    """A field that is size text; plain integers are accepted."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise damaged(where, "must be size text")
    return expr.of(value)


@dataclass(frozen=True)
class Param:
    """One parameter of a launch, by `kind`:

    - "arg": the address of the launch's argument number `index`;
    - "map": the 128 bytes of its tensor map number `index`;
    - "size": the value of `size` in this step, of `type` i32 or i64;
    - "value": the number `value`, of `type` i32, i64 or f32.
    """

    kind: str
    index: int = 0
    size: Expr | None = None
    value: int | float = 0
    type: str = ""

    @property
    def bits(self) -> int:
        """The bytes of a "value" as an unsigned number, the first byte lowest."""
        return int.from_bytes(struct.pack(TYPES[self.type], self.value), "little")

    @staticmethod
    def read(value: Any, where: str, lenient: bool = False) -> Param:
        """Raises LlmcError E103 if it is none of the four kinds, or a number does not fit its type."""
        f = Fields(value, where, lenient)
        kind = next((k for k in ("arg", "map", "size", "value") if k in value), "")
        if kind in ("arg", "map"):
            param = Param(kind, f.integer(kind, high=4096))
        elif kind == "size":
            param = Param(kind, size=a_size(f.get(kind), where), type=f.text("type"))
        elif kind == "value":
            param = Param(kind, value=f.get(kind), type=f.text("type"))
        else:
            raise damaged(where, "a parameter is an arg, a map, a size or a value")
        f.close()
        param.check(where)
        return param

    def check(self, where: str) -> None:
        """Raises LlmcError E103 if the type is unknown or the number does not fit it."""
        if self.kind in ("arg", "map"):
            return
        if self.type not in TYPES or (self.kind == "size" and self.type == "f32"):
            raise damaged(where, f"a {self.kind} has no type {self.type[:20]!r}")
        try:
            if self.kind == "value" and isinstance(self.value, bool):
                raise ValueError("it is no number")
            _ = self.bits
        except (struct.error, OverflowError, ValueError) as e:
            raise damaged(where, f"the value does not fit {self.type}: {str(e)[:80]}") from None

    def json(self) -> dict[str, Any]:
        if self.kind in ("arg", "map"):
            return {self.kind: self.index}
        return {self.kind: str(self.size) if self.kind == "size" else self.value, "type": self.type}
