"""Types of values: dense tensors, quantised tensors, and states, which are updated in place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from llmc.ir.dim import Dim, DimLike, product
from llmc.ir.dtype import DTYPES
from llmc.ir.qformat import QFormat


@dataclass(frozen=True)
class Type:
    """The type of a value; storage is dense and row-major. For a quantised tensor, `dtype` is the logical dtype."""

    dtype: str
    shape: tuple[Dim, ...]
    state: bool = False
    format: QFormat | None = None

    def __str__(self) -> str:
        name = self.format.name if self.format else self.dtype
        return f"{'state ' if self.state else ''}{name}[{', '.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @cached_property
    def numel(self) -> Dim:
        """The number of elements."""
        return product(self.shape)

    @cached_property
    def nbytes(self) -> Dim:
        """Bytes of storage, including all parts of a quantised tensor."""
        if self.format is None:
            return (self.numel * DTYPES[self.dtype].bits).ceildiv(8)
        parts = self.format.parts(self.shape).values()
        total = Dim.of(0)
        for dt, shape in parts:
            total = total + (product(shape) * DTYPES[dt].bits).ceildiv(8)
        return total

    def whole_blocks(self, axis: int, length: DimLike) -> bool:
        """Whether `length` elements along an axis are whole blocks of a quantised tensor; true for other tensors.

        Parts can be cut there, and other tensors of the format appended.
        """
        if self.format is None or axis < self.rank - 2:
            return True
        size = self.format.block[axis - self.rank + 2]
        return size > 0 and Dim.of(length).divisible(size)

    def can_cut(self, axis: int, at: DimLike) -> bool:
        """Whether a quantised tensor can be cut in front of element `at` of an axis; true for other tensors.

        It can between two blocks, and anywhere in a block that spans the axis: both parts keep its scale.
        """
        if self.format is None or axis < self.rank - 2:
            return True
        return self.format.block[axis - self.rank + 2] == 0 or self.whole_blocks(axis, at)

    def with_shape(self, *shape: DimLike) -> Type:
        """Return this type with another shape."""
        return Type(self.dtype, tuple(Dim.of(d) for d in shape), self.state, self.format)

    def subs(self, env: Mapping[str, DimLike]) -> Type:
        """Return this type with symbols replaced by sizes."""
        return Type(self.dtype, tuple(d.subs(env) for d in self.shape), self.state, self.format)


def tensor(dtype: str, *shape: DimLike) -> Type:
    """Return a dense tensor type; raises ValueError for an unknown dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"{dtype!r} is not a dtype; known: {', '.join(DTYPES)}")
    return Type(dtype, tuple(Dim.of(d) for d in shape))


def state(dtype: str, *shape: DimLike) -> Type:
    """Return a state type. Every write makes a new version, and only the newest version may be used."""
    t = tensor(dtype, *shape)
    return Type(t.dtype, t.shape, True)


_TYPE = re.compile(r"\s*(state\s+)?(\w+)\[(.*)\]\s*", re.S)


def unquoted(text: str) -> Iterator[tuple[int, str]]:
    """Yield (index, character) for every character outside string literals."""
    in_literal = escaped = False
    for i, c in enumerate(text):
        if escaped:
            escaped = False
        elif in_literal:
            escaped = c == "\\"
            in_literal = c != '"'
        elif c == '"':
            in_literal = True
        else:
            yield i, c


def split_commas(text: str, separators: str = ",") -> list[str]:
    """Split at commas, or other separators, outside of (), [], {} and string literals; empty parts are dropped."""
    out, depth, start = [], 0, 0
    for i, c in unquoted(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        if c in separators and depth == 0:
            out.append(text[start:i])
            start = i + 1
    return [s.strip() for s in [*out, text[start:]] if s.strip()]


def parse_type(text: str, formats: Mapping[str, QFormat] | None = None) -> Type:
    """Parse a type, the inverse of `str(type)`; `formats` are the module's quantised formats. Raises ValueError."""
    m = _TYPE.fullmatch(text)
    if not m:
        raise ValueError(f"not a type: {text!r}")
    shape = tuple(Dim.of(s) for s in split_commas(m[3]))
    if m[2] in DTYPES:
        return Type(m[2], shape, bool(m[1]))
    if formats and m[2] in formats:
        f = formats[m[2]]
        return Type(f.logical, shape, bool(m[1]), f)
    raise ValueError(f"not a type: {text!r}: {m[2]!r} is neither a dtype nor a format of this module")
