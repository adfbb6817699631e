"""The interface of quantisation schemes. Each scheme is a module.

A scheme reads the tensors of one weight and returns them as codes, scales and zero points in one form, for all file
layouts. Schemes are registered under the `quant_method` of config.json in `Extension.schemes`, as a function of the
`quantization_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Builder, Value

LINEAR = ("Linear",)  # the classes of a module that is part of a larger one in the model, such as an expert of a stack
AGAIN = "download the checkpoint again; config.json and weights must be of one revision"
POWER_COLUMNS = 32  # columns that share a power of two in the OCP's microscaling formats


@dataclass(frozen=True)
class Groups:
    """The group of each column, i32[k], and its bytes. Sorted by group, columns are runs of equal size."""

    index: Value
    content: bytes


@dataclass(frozen=True)
class Codes:
    """A quantised weight: `(code - zero) * scale`, as `dequantize` computes it.

    code: [*experts, n, k], in the order of the unpacked weight. scale, and zero if it is a value:
    [*experts, blocks of n, blocks of k]. block: rows and columns that share a scale; 0 is the whole axis. zero: zero
    points, one for all codes, or none (0). values: the encoding of codes that are not numbers, such as "e2m1". groups:
    the groups of the columns, if they are not runs of neighbours. label: the format's name in reports. transposed: the
    model holds the transpose, [*experts, k, n]. act: the dtype of the activations that the checkpoint names, to which
    a product with this weight may round its other operand; "" if it names none, or one that is not supported.
    """

    code: Value
    scale: Value
    block: tuple[int, int]
    label: str
    zero: Value | int = 0
    values: str = ""
    groups: Groups | None = None
    transposed: bool = False
    act: str = ""


@dataclass(frozen=True)
class Stored:
    """The stored tensors of one weight.

    name: of the weight, as an unquantised checkpoint has it. parts: tensors by the names of a scheme's parts. build
    adds nodes to the tensors' graph. load returns a stored tensor by its name. classes: names of the class of the
    module that has the weight, and of its bases. shape: of the weight in the model, () if the model holds it as a part
    of another one. metadata returns the texts in the headers of the files, by name.
    """

    name: str
    parts: Mapping[str, Value]
    build: Builder
    load: Callable[[str], np.ndarray]
    classes: tuple[str, ...] = LINEAR
    shape: tuple[int, ...] = ()
    metadata: Callable[[], Mapping[str, str]] = dict

    @property
    def module(self) -> str:
        """The module that has the weight."""
        return self.name.removesuffix(".weight")

    def part(self, name: str, dtypes: Sequence[str], rank: int | None = None) -> Value:
        """Return a part; raises Diagnostic E340 if it is missing, E341 if it has another dtype or rank."""
        if name not in self.parts:
            present = ", ".join(sorted(self.parts))
            raise Diagnostic("E340", f"{self.module} has {present} and lacks {name}", AGAIN)
        value = self.parts[name]
        if value.type.dtype not in dtypes or (rank is not None and value.type.rank != rank):
            axes = "" if rank is None else f" of rank {rank}"
            raise Diagnostic("E341", f"{value.name} is {value.type}, not {' or '.join(dtypes)}{axes}", AGAIN)
        return value

    def expect(self, value: Value, *shape: int) -> None:
        """Raise Diagnostic E341 if a part does not have this shape."""
        if shape_of(value) != shape:
            raise Diagnostic("E341", f"{value.name} is {value.type}; its shape should be {list(shape)}", AGAIN)

    def single(self, name: str, dtypes: Sequence[str]) -> Value:
        """Return a part of one element; raises Diagnostic E340 if it is missing, E341 if it has more."""
        value = self.part(name, dtypes)
        if int(np.prod(shape_of(value))) != 1:
            raise Diagnostic("E341", f"{value.name} is {value.type}; one number is expected", AGAIN)
        return value

    def number(self, name: str, dtypes: Sequence[str]) -> Value:
        """Return a part of one element, as `single`, in the shape [1, 1]."""
        return self.build.reshape(self.single(name, dtypes), shape=(1, 1))

    def rows_and_columns(self, name: str) -> tuple[int, int]:
        """Return the shape of the weight that a part holds; raises Diagnostic E340 or E341."""
        part = self.part(name, ("i64", "i32"), 1)
        self.expect(part, 2)
        n, k = self.load(part.name)
        return int(n), int(k)

    def check_finite(self, value: Value, used: Callable[[np.ndarray], np.ndarray] = np.asarray) -> None:
        """Raise Diagnostic E342 if a zero point, or another number that is added to a weight, is NaN or infinite.

        `used` returns the numbers without padding, which may have any content.
        """
        numbers = used(self.load(value.name)).astype(np.float32)
        if not np.isfinite(numbers).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
            cause = f"{value.name} has {numbers[where]} at {list(where)}; a finite number is expected"
            raise Diagnostic("E342", cause, AGAIN)

    def check_scales(self, value: Value, used: Callable[[np.ndarray], np.ndarray] = np.asarray) -> None:
        """Raise Diagnostic E342 if a scale is NaN, infinite or zero (scales of eight bits may be zero).

        `used`: see `check_finite`.
        """
        scales = used(self.load(value.name))
        if scales.dtype == np.uint8:
            scales = scales.view(DTYPES["f8e8m0"].np)
        wide = scales.astype(np.float32)
        bad = ~np.isfinite(wide) | ((wide == 0) & (scales.dtype.itemsize > 1))
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            cause = f"{value.name} has the scale {wide[where]} at {list(where)} ({int(bad.sum())} such scales)"
            raise Diagnostic("E342", cause, AGAIN)

    def scales(self, name: str, dtypes: Sequence[str], *shape: int) -> Value:
        """Return a part that holds scales, of any shape if none is given; bytes are exponents of powers of two.

        Raises Diagnostic E340 and E341 as `part` and `expect` do, and E342 as `check_scales` does.
        """
        value = self.part(name, dtypes, len(shape) if shape else None)
        if shape:
            self.expect(value, *shape)
        self.check_scales(value)
        return self.build.bitcast(value, dtype="f8e8m0") if value.type.dtype == "u8" else value

    def groups(self, part: str, columns: int, count: int, size: int) -> Groups | None:
        """Return the groups of the columns, or None if the part is missing or groups are runs of `size` columns.

        A part of only zeros means such runs as well: some tools store zeros if the columns have their natural order.
        Raises Diagnostic E341 if the part does not have `columns` entries, E342 if one is not below `count`, or if a
        group has more or fewer columns than the run that it stands for.
        """
        if part not in self.parts:
            return None
        value = self.part(part, ("i32",), 1)
        self.expect(value, columns)
        index = self.load(value.name)
        if index.min(initial=0) < 0 or index.max(initial=0) >= count:
            worst = index[(index < 0) | (index >= count)][0]
            raise Diagnostic("E342", f"{value.name} names group {worst}; there are {count} groups of scales", AGAIN)
        runs = np.arange(columns) // size
        if np.array_equal(index, runs) or not index.any():
            return None
        sizes, expected = (np.bincount(x, minlength=count) for x in (index, runs))
        if (sizes != expected).any():
            g = int(np.argmax(sizes != expected))
            cause = f"{value.name} puts {sizes[g]} columns in group {g}, which has {expected[g]} columns"
            raise Diagnostic("E342", cause, AGAIN)
        return Groups(value, index.tobytes())


class Scheme(Protocol):
    """One quantisation scheme, made from a checkpoint's `quantization_config`."""

    def split(self, name: str) -> tuple[str, str] | None:
        """Return (weight, part) of a tensor's name, or None if the tensor is not a part of a quantised weight.

        The weight is named as in an unquantised checkpoint. It is quantised if it has a part besides "weight".
        """

    def decode(self, stored: Stored) -> Codes:
        """Return the codes of a weight; raises Diagnostic E307 (unsupported variant), E340, E341 or E342."""


class PartNames:
    """Base class of schemes whose tensors are named "module.part", with the parts in `parts`."""

    parts: ClassVar[tuple[str, ...]]

    def split(self, name: str) -> tuple[str, str] | None:
        """See `Scheme.split`."""
        return last_part(name, self.parts)


SchemeOf = Callable[[Mapping[str, Any]], Scheme]


def last_part(name: str, parts: Sequence[str]) -> tuple[str, str] | None:
    """Split "module.part" into ("module.weight", part), if the part is one of `parts`."""
    module, _, part = name.rpartition(".")
    return (f"{module}.weight", part) if module and part in parts else None


def shape_of(value: Value) -> tuple[int, ...]:
    """Return the shape of a stored tensor or of a value made of some."""
    return tuple(int(d.const or 0) for d in value.type.shape)


def refuse(method: str, key: str, value: Any, known: Sequence[Any]) -> Diagnostic:
    """Return the error for a variant of a scheme that is not supported."""
    choices = ", ".join(map(str, known))
    return Diagnostic(
        "E307", f"quantization_config ({method}) has {key} = {str(value)[:80]!r}; supported: {choices}",
        "use a checkpoint of a supported variant, or the original one",
    )  # fmt: skip


def supported(method: str, key: str, value: Any, known: Collection[Any]) -> Any:
    """Return the value if it is among the supported ones; raises Diagnostic E307 otherwise."""
    if value not in tuple(known):
        raise refuse(method, key, value, tuple(known))
    return value


def activations(method: str, key: str, kind: str, bits: Any) -> str:
    """Return the dtype of activations of `kind` ("int" or "float") as `Codes.act` names it.

    Activations of 4 bits have none: they are not rounded. The checkpoint's scales of activations are not used, because
    products compute a scale for each row at run time. Raises Diagnostic E307 for other kinds.
    """
    known = {("int", 8): "i8", ("float", 8): "f8e4m3", ("int", 4): "", ("float", 4): ""}
    if type(bits) is not int or (kind, bits) not in known:
        raise refuse(method, key, f"{kind} of {bits} bits", [f"{name} of {width} bits" for name, width in known])
    return known[kind, bits]


def left_out(module: str, rule: str) -> Diagnostic:
    """Return the error for a module that is quantised although a rule of the configuration leaves it out."""
    return Diagnostic("E340", f"{module} is quantised, and quantization_config leaves it out: {rule}", AGAIN)


def integer(config: Mapping[str, Any], key: str, method: str, default: int | None = None) -> int:
    """Return an integer of a quantization_config; raises Diagnostic E340 if it is missing or another type."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Diagnostic("E340", f"quantization_config ({method}) has {key} = {value!r:.80}, not an integer", AGAIN)
    return value


def columns_of_group(config: Mapping[str, Any], key: str, method: str, default: int) -> int:
    """Return how many columns share a scale, -1 for all of a row; raises Diagnostic E340 for other values."""
    size = integer(config, key, method, default)
    if size < 1 and size != -1:
        cause = f"quantization_config ({method}) has {key} = {size}; it is a number of columns, or -1 for all of a row"
        raise Diagnostic("E340", cause, AGAIN)
    return size


def table(config: Mapping[str, Any], key: str, method: str) -> Mapping[str, Any]:
    """Return a table of a quantization_config, empty if it is missing; raises Diagnostic E340 for another type."""
    value = config.get(key) or {}
    if not isinstance(value, dict):
        raise Diagnostic("E340", f"quantization_config ({method}) has {key} = {value!r:.80}, not a table", AGAIN)
    return value


def with_offsets(b: Builder, code: Value, scale: Value, offset: Value, size: int, label: str, zero: int = 0) -> Codes:
    """Return codes of `(code - zero) * scale + offset`; groups of `size` columns (0: all) share scale and offset."""
    block = (1, size)
    scaled = b.dequantize(code, scale, block=block, dtype="f32", zero_point=zero)
    ones = b.broadcast(b.constant(1.0, "f32"), shape=shape_of(scale))
    return Codes(scaled, ones, block, label, b.neg(b.cast(offset, dtype="f32")))


def block_of(stored: Stored, scale: Value, n: int, k: int, size: tuple[int, int]) -> tuple[Value, tuple[int, int]]:
    """Return the scale as a matrix, and its block, of a weight [n, k]: of the tensor, of rows, of groups or of tiles.

    `size` is the block that the configuration names, 0 for a whole axis; a scale with one entry, or one per row, is
    recognized by its shape. Raises Diagnostic E341 if the shape fits no such block.
    """
    shape, b = shape_of(scale), stored.build
    if int(np.prod(shape)) == 1:
        return b.reshape(scale, shape=(1, 1)), (0, 0)
    if shape in ((n,), (n, 1)):
        return b.reshape(scale, shape=(n, 1)), (1, 0)
    rows, columns = (-(-length // part) if part else 1 for length, part in zip((n, k), size, strict=True))
    stored.expect(scale, rows, columns)
    return scale, size


def nibbles(stored: Stored, part: str) -> Value:
    """Return the codes [n, k] of 4 bits in a part u8 [n, k / 2], the low bits first; raises Diagnostic E340 or E341."""
    packed = stored.part(part, ("u8",), 2)
    return stored.build.unpack_bits(packed, bits=4, axis=1, size=2 * shape_of(packed)[1])


def microscaled(stored: Stored, code: Value, label: str, values: str = "", act: str = "") -> Codes:
    """Return codes whose runs of 32 columns have scales `weight_scale`, stored as exponents of powers of two.

    Raises Diagnostic E340 to E342.
    """
    n, k = shape_of(code)
    scale = stored.scales("weight_scale", ("u8", "f8e8m0"), n, -(-k // POWER_COLUMNS))
    return Codes(code, scale, (1, POWER_COLUMNS), label, values=values, act=act)


def nvfp4(stored: Stored, part: str, tensor_scale: str, divides: bool) -> Codes:
    """Return codes of 4-bit floats, whose runs of 16 columns have scales `weight_scale`, f8e4m3 [n, k / 16].

    The scales are multiplied, or divided, by the number in the part `tensor_scale`. Raises Diagnostic E340 to E342.
    """
    b, code = stored.build, nibbles(stored, part)
    n, k = shape_of(code)
    scale, whole = stored.scales("weight_scale", ("f8e4m3",), n, -(-k // 16)), stored.number(tensor_scale, ("f32",))
    stored.check_scales(stored.parts[tensor_scale])
    factor = (b.div if divides else b.mul)(b.cast(scale, dtype="f32"), whole)
    return Codes(code, factor, (1, 16), "nvfp4", values="e2m1")
