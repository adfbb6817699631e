"""Quantised storage formats as data: the parts in which a logical tensor is stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES

# Non-integer dtypes of codes of less than 8 bits -> the name of their encoding in `dequantize`.
ENCODINGS: Mapping[str, str] = MappingProxyType({"f4e2m1": "e2m1"})


@dataclass(frozen=True)
class QFormat:
    """The storage of a logical float tensor [*stack, n, k].

    code: dtype of the codes (u4, i8, f8e4m3, f4e2m1, ...). block: (rows, columns) that share one scale; 0 means the
    whole axis. scale: dtype of the scales. zero: "" (none), an integer used for all codes, or the dtype of an array of
    zero points with the shape of the scales. table: the values of a codebook; if empty, codes are numbers. logical:
    dtype of the dequantised values, which are (code - zero) * scale, or table[code] * scale. act: dtype to which a
    product with this weight may round the rows of its other operand, where that is faster; "" for none.
    """

    name: str
    code: str
    block: tuple[int, int]
    scale: str
    zero: str = ""
    table: tuple[float, ...] = ()
    logical: str = "bf16"
    act: str = ""

    def __post_init__(self) -> None:
        for dt in (self.code, self.scale, self.logical, *filter(None, [self.act])):
            if dt not in DTYPES:
                raise ValueError(f"format {self.name}: {dt!r} is not a dtype")
        if self.name in DTYPES or not re.fullmatch(r"[A-Za-z_]\w*", self.name):
            raise ValueError(f"{self.name!r} is not a valid format name: use an identifier that is not a dtype")

    @staticmethod
    def of(
        code: str, block: tuple[int, int], scale: str, zero: str = "", logical: str = "bf16", act: str = ""
    ) -> QFormat:
        """Return the format with these fields, named after them: u4_1x128_bf16_z8."""
        zeros = f"_z{zero}" if zero else ""
        rest = ("" if logical == "bf16" else f"_{logical}") + (f"_a{act}" if act else "")
        return QFormat(f"{code}_{block[0]}x{block[1]}_{scale}{zeros}{rest}", code, block, scale, zero, (), logical, act)

    @property
    def storage(self) -> str:
        """The dtype of unpacked codes: codes of less than 8 bits are stored in one byte each."""
        return self.code if DTYPES[self.code].bits >= 8 else "u8"

    @property
    def values(self) -> str:
        """The encoding of codes that are stored as u8 and stand for other numbers, as `dequantize` names it, or ""."""
        return ENCODINGS.get(self.code, "")

    @property
    def zero_point(self) -> int:
        """The zero point of all codes; 0 if there is none, or if there is one for each scale."""
        return int(self.zero) if self.zero and self.zero not in DTYPES else 0

    @property
    def has_zeros(self) -> bool:
        """Whether there is a zero point for each scale."""
        return self.zero in DTYPES

    def scale_shape(self, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """Return the shape of the scales of a tensor [*batch, n, k]."""
        return scale_shape(shape, self.block)

    def parts(self, shape: tuple[Dim, ...]) -> dict[str, tuple[str, tuple[Dim, ...]]]:
        """Map part names to (dtype, shape). Part axes follow the logical axes, so parts can be sliced and joined."""
        out = {"code": (self.code, shape), "scale": (self.scale, self.scale_shape(shape))}
        if self.zero in DTYPES:
            out["zero"] = (self.zero, self.scale_shape(shape))
        return out

    def __str__(self) -> str:
        fields = [f"code={self.code}", f"block=[{self.block[0]}, {self.block[1]}]", f"scale={self.scale}"]
        if self.zero:
            fields.append(f"zero={self.zero}")
        if self.table:
            fields.append(f"table=[{', '.join(map(repr, self.table))}]")
        fields.append(f"logical={self.logical}")
        if self.act:
            fields.append(f"act={self.act}")
        return f"format {self.name} = {{{', '.join(fields)}}}"


def scale_shape(shape: tuple[Dim, ...], block: tuple[int, ...]) -> tuple[Dim, ...]:
    """Return the shape of the scales of codes [*batch, n, k], given the rows and columns that share one (0: all)."""
    sizes = zip(shape[-2:], block, strict=True)
    return (*shape[:-2], *(length.ceildiv(size) if size else Dim.of(1) for length, size in sizes))


def _items(text: str) -> list[str]:
    """Split a list such as "[1, 0]"."""
    return [item for item in text.strip("[]").split(",") if item.strip()]


_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,{}]+)")


def parse_qformat(line: str) -> QFormat:
    """Parse the text form, the inverse of `str(format)`; raises ValueError or KeyError if it is malformed."""
    match = re.fullmatch(r"format (\w+) = \{(.*)\}", line.strip())
    if not match:
        raise ValueError(f"not a format: {line!r}")
    fields = {name: text.strip() for name, text in _FIELD.findall(match[2])}
    if unknown := set(fields) - {"code", "block", "scale", "zero", "table", "logical", "act"}:
        raise ValueError(f"format {match[1]}: unknown field {sorted(unknown)[0]!r}")
    block = _items(fields.get("block", "[1, 0]"))
    return QFormat(
        match[1],
        fields["code"],
        (int(block[0]), int(block[1])),
        fields["scale"],
        fields.get("zero", ""),
        tuple(map(float, _items(fields.get("table", "[]")))),
        fields.get("logical", "bf16"),
        fields.get("act", ""),
    )
