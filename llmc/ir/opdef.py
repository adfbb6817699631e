"""Op declarations. Builder, verifier, parser, interpreter, cost model, documentation and tests all derive from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from llmc.ir.contents import Content
from llmc.ir.dim import Dim
from llmc.ir.dtype import DTYPES
from llmc.ir.scalar import E
from llmc.ir.signature import Mismatch, Slot, bind, expand, numbers_of, parse_signature, present
from llmc.ir.types import Type

Shape = tuple[Dim, ...]
Ints = tuple[int, ...]
Strs = tuple[str, ...]

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class Attr:
    """An attribute's type (int, float, str, bool, Dim, Shape, Ints or Strs) and default (REQUIRED if it has none)."""

    type: Any
    default: Any = REQUIRED

    def normal(self, op: str, name: str, value: Any) -> Any:
        """Convert a value to its normal form; raises Mismatch if it has the wrong type."""
        try:
            return _normal(self.type, value)
        except (TypeError, ValueError) as e:
            raise Mismatch(f"{op}: attribute {name}={value!r}: {e}") from None


def _normal(ty: Any, value: Any) -> Any:
    """Convert `value` to the attribute type `ty`; raises TypeError or ValueError."""
    if ty is Dim:
        return Dim.of(value)
    if ty in (Shape, Ints, Strs):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError("expected a list")
        element = {Shape: Dim, Ints: int, Strs: str}[ty]
        return tuple(_normal(element, v) for v in value)
    if isinstance(value, Dim) and ty is int and value.const is not None:
        return value.const
    if ty is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, ty) or (ty is int and isinstance(value, bool)):
        raise TypeError(f"expected {ty.__name__}")
    return value


@dataclass(frozen=True, eq=False)
class OpDef:
    """A declared op. The fields are those of `op`."""

    name: str
    operands: tuple[Slot, ...]
    results: tuple[Slot, ...]
    attrs: Mapping[str, Attr]
    ref: Callable[..., Any]
    flops: str = "0"
    bytes: str | None = None
    commutes: bool = False
    elementwise: bool = False
    writes: tuple[str, ...] = ()
    scalar: Callable[[Mapping[str, Any]], E] | None = None
    oracle: str | None = None
    infer: Callable[[dict[str, Any], Mapping[str, Any]], list[Type]] | None = None
    holds: Mapping[str, Content] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
    doc: str = ""
    signature: str = field(default="", compare=False)

    @property
    def row_wise(self) -> bool:
        """Whether the op computes on the last axes of its first operand, separately for each index of the axes `*b`.

        The signature declares this with `*b`: `(x: f[*b, k], w: f[n, k]) -> x[*b, n]`.
        """
        leading = self.leading(self.operands[0]) if self.operands else None
        return leading is not None and all(self.leading(r) == leading for r in self.results)

    @staticmethod
    def leading(slot: Slot) -> str | None:
        """Return the name of the leading axes of an operand or result such as `x: f[*b, k]`; None if it has none."""
        return slot.dims[0] if len(slot.dims) > 1 and slot.dims[0].startswith("*") else None

    def axes(self, attrs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the axes of the first operand along which elements are combined, selected or numbered.

        These are the attribute `axis`, or the last axes of a row-wise op that no result has (or, if the
        results have all of them, all last axes).
        """
        if "axis" in self.attrs:
            return (attrs["axis"],)
        if not self.row_wise:
            return ()
        last = self.operands[0].dims[1:]
        combined = [d for d in last if not any(d in r.dims for r in self.results)]
        return tuple(i - len(last) for i, d in enumerate(last) if d in (combined or last))

    def normal_attrs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return all attributes in declaration order with defaults; raises Mismatch for an unknown or missing one."""
        if unknown := [k for k in values if k not in self.attrs]:
            known = ", ".join(self.attrs) or "none"
            raise Mismatch(f"{self.name} has no attribute {unknown[0]!r} (its attributes: {known})")
        out = {}
        for name, a in self.attrs.items():
            value = values.get(name, a.default)
            if value is REQUIRED:
                raise Mismatch(f"{self.name} needs the attribute {name!r}")
            out[name] = a.normal(self.name, name, value)
        return out

    def slots(self, types: Sequence[Type]) -> tuple[Slot, ...]:
        """Return the slots of operands of these types; see `signature.present`."""
        return present(self.operands, types)

    def places(self, types: Sequence[Type]) -> dict[str, int]:
        """Map the names of the operands that a node with these types has to their positions."""
        return {slot.name: i for i, slot in enumerate(self.slots(types)[: len(types)])}

    def evaluate(self, types: Sequence[Type], operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """Call the reference with operands of these types; scales of 8-bit floats are keyword arguments.

        If the op writes the state that they scale, so is `largest`, the largest number that the state holds.
        """
        scales = {s.name: x for s, x in zip(self.slots(types), operands, strict=False) if s.scales}
        if not scales:
            return self.ref(*operands, **attrs)
        for name in {s.scales for s in self.slots(types) if s.scales}.intersection(self.writes):
            scales["largest"] = DTYPES[types[self.places(types)[name]].dtype].largest
        rest = [x for s, x in zip(self.slots(types), operands, strict=False) if not s.scales]
        return self.ref(*rest, **scales, **attrs)

    def bind(self, types: Sequence[Type]) -> dict[str, Any]:
        """Match operand types against the signature; see `signature.bind`."""
        return bind(self.name, self.operands, types)

    def sizes(self, types: Sequence[Type], attrs: Mapping[str, Any]) -> dict[str, Dim]:
        """Return the sizes that the signature names (`*b` as the product b) and the attributes that are integers."""
        return numbers_of(self.bind(types)) | _dims(attrs)

    def infer_types(self, types: Sequence[Type], attrs: Mapping[str, Any]) -> list[Type]:
        """Return the result types for operand types and normalized attributes; raises Mismatch if they do not fit."""
        env = self.bind(types)
        if self.infer:
            try:
                return self.infer(env, attrs)
            except Mismatch as e:
                raise Mismatch(f"{self.name}: {e}") from None
        env |= _dims(attrs)
        return [self._result(r, env, attrs) for r in self.results]

    def _result(self, slot: Slot, env: dict[str, Any], attrs: Mapping[str, Any]) -> Type:
        """Return the type of one result, with dtype reference and dims resolved in the binding."""
        dtype = slot.dtype
        if isinstance(ref := env.get(dtype), Type):
            dtype = ref.dtype
        elif isinstance(attrs.get(dtype), str):
            dtype = attrs[dtype]
        if dtype not in DTYPES:
            raise Mismatch(f"{self.name}: {dtype!r} is not a dtype")
        return Type(dtype, expand(slot.dims, env), slot.state)

    def cost(self, types: Sequence[Type], results: Sequence[Type], attrs: Mapping[str, Any]) -> tuple[Dim, Dim]:
        """Return flops and minimum bytes moved, as Dims."""
        env = self.bind(types)
        sizes = numbers_of(env) | _dims(attrs)
        sizes["out"] = results[0].numel
        for slot, ty in env.items():
            if isinstance(ty, Type):
                sizes[f"bytes_{slot}"] = Dim.of(DTYPES[ty.dtype].bits // 8)
        if self.bytes is None:
            moved = sum((t.nbytes for t in [*types, *results] if not t.state), Dim.of(0))
        else:
            moved = Dim.of(self.bytes).subs(sizes)
        return Dim.of(self.flops).subs(sizes), moved


def _dims(attrs: Mapping[str, Any]) -> dict[str, Dim]:
    """Return the attributes that are integers or sizes, as sizes."""
    return {k: Dim.of(v) for k, v in attrs.items() if isinstance(v, Dim | int) and not isinstance(v, bool)}


def op(signature: str, **fields: Any) -> Callable[[Callable[..., Any]], OpDef]:
    """Declare an op by its signature and, as the decorated function, its numpy reference.

    The function's keyword-only parameters are the op's attributes, its docstring is the op's documentation.

    flops, bytes: size text over the signature's names ("*b" is named b, "out" is the element count of the first result,
    "bytes_x" the element size of operand x); bytes=None counts every operand and result once, except states. commutes:
    the first two operands may be swapped. elementwise: operands and results have one shape, and elements at different
    indices do not interact (implied by `scalar`). writes: the state operands that the op updates, in the order
    of the results that are their next versions. scalar: attributes -> the expression per element (or row). oracle: a
    torch function to test against. infer: the type rule, if a signature cannot express it. holds: operand name -> its
    content (see `llmc.ir.contents`), needed for integers that are not arbitrary; names that the op lacks are ignored,
    so that ops can share a table. example: attributes and sizes of an example for tests: sizes of the signature, the
    axes of `*b`, dtypes of operands, or the shapes of a variadic one; {"k": 5, "*b": (3,), "xs": [(3, 2)]}. attrs_of:
    an op whose attributes follow the function's own, except those named in `without`; the function takes them as
    `**attrs`.
    """
    operands, results = parse_signature(signature)
    shared, without = fields.pop("attrs_of", None), fields.pop("without", ())
    contents = fields.pop("holds", {})

    def wrap(fn: Callable[..., Any]) -> OpDef:
        attrs = _own_attrs(fn)
        if shared:
            attrs |= {name: attr for name, attr in shared.attrs.items() if name not in without}
        name = fields.pop("name", fn.__name__.rstrip("_"))
        fields["holds"] = MappingProxyType({s.name: contents[s.name] for s in operands if s.name in contents})
        doc = fields.pop("doc", None) or inspect.getdoc(fn) or ""
        declared = OpDef(name, operands, results, MappingProxyType(attrs), fn, doc=doc, signature=signature, **fields)
        _check_costs(declared)
        return declared

    return wrap


def _own_attrs(fn: Callable[..., Any]) -> dict[str, Attr]:
    """Return the attributes that a reference declares as keyword-only parameters, with normal defaults."""
    attrs = {}
    for p in inspect.signature(fn, eval_str=True).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            default = REQUIRED if p.default is REQUIRED else _normal(p.annotation, p.default)
            attrs[p.name] = Attr(p.annotation, default)
    return attrs


def _check_costs(o: OpDef) -> None:
    """Raise ValueError if `flops` or `bytes` use a name that neither the signature nor an attribute binds."""
    dims = [d for slot in o.operands for d in slot.dims if d != "..."]
    sizes = {name for d in dims for name in Dim.of(d.removeprefix("*")).symbols}
    known = {*sizes, *o.attrs, "out", *(f"bytes_{slot.name}" for slot in o.operands)}
    for field_name, text in (("flops", o.flops), ("bytes", o.bytes or "0")):
        if unknown := sorted(Dim.of(text).symbols - known):
            names = ", ".join(sorted(known))
            raise ValueError(f"op {o.name}: {field_name}={text!r} uses {unknown[0]!r}; known names: {names}")
