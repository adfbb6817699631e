"""Op signatures: an op's type rule in one line, similar to einsum notation.

    (x: f[*b, k], w: fq[n, k]) -> x[*b, n]

A name is bound to the size of its first match and must match it afterwards; `*b` binds any number of axes; an
expression (`r+1`) of bound names must equal the size. `xs*: t[*s]` takes any number of operands, `s?: f[h]` is an
optional last operand, `s?kv: f[h]` exists if and only if the earlier operand kv has 8-bit floats, and
`kv: state t[p, d]` is a state. Dtype classes are f (float), fq (float or quantised), i (integer), b (bool) and t (any).
A result's dtype is a dtype, an operand's name (the same dtype), or a str attribute that holds a dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.ir.dim import Dim, product
from llmc.ir.dtype import DTYPES
from llmc.ir.types import Type, split_commas


@dataclass(frozen=True)
class Slot:
    """One operand or result of a signature: its dtype class or reference, and its dims as written."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    state: bool = False
    many: bool = False
    optional: bool = False
    scales: str = ""  # the operand that this one scales; this one exists only if that one has 8-bit floats


class Mismatch(TypeError):
    """Operand types or attributes that do not fit an op. The message names the operand and the reason."""


_SLOT = re.compile(r"(?:(\w+)([*?]?)(\w*)\s*:\s*)?(state\s+)?(\w+)\[([^\]]*)\]")


def parse_signature(text: str) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """Parse a signature into operand slots and result slots; raises ValueError if it is malformed."""
    ins, arrow, outs = text.partition("->")
    if not arrow:
        raise ValueError(f"signature {text!r} has no ->")
    if rest := _SLOT.sub("", ins + outs).strip(" (),"):
        raise ValueError(f"signature {text!r}: {rest!r} is not an operand or a result")

    def slot(m: re.Match[str]) -> Slot:
        name, mark, scales, state, dtype, dims = m.groups(default="")
        return Slot(
            name, dtype, tuple(split_commas(dims)), bool(state), mark == "*", mark == "?" and not scales, scales
        )

    operands = tuple(map(slot, _SLOT.finditer(ins)))
    if unbound := _unbound(operands):
        raise ValueError(f"signature {text!r}: {unbound}")
    return operands, tuple(map(slot, _SLOT.finditer(outs)))


def _unbound(operands: Sequence[Slot]) -> str:
    """Describe an expression of a size that uses a name before a size binds it; "" if there is none."""
    bound: set[str] = set()
    for operand in operands:
        if operand.many:
            continue
        for dim in operand.dims:
            if dim.isidentifier():
                bound.add(dim)
            elif dim[0] != "*":
                unbound = sorted(Dim.of(dim).symbols - bound)
                if unbound:
                    return f"{dim} of operand {operand.name} uses {unbound[0]}, which no size before it binds"
    return ""


def present(slots: Sequence[Slot], types: Sequence[Type]) -> tuple[Slot, ...]:
    """Return the slots of operands of these types, without scales of operands that are not 8-bit floats."""
    names = [s.name for s in slots]  # scaled operands precede their scales
    dtypes = {name: DTYPES[t.dtype] for name, t in zip(names, types, strict=False)}

    def scaled(name: str) -> bool:
        return name in dtypes and dtypes[name].kind == "f" and dtypes[name].bits == 8

    return tuple(s for s in slots if not s.scales or scaled(s.scales))


def bind(op: str, slots: Sequence[Slot], types: Sequence[Type]) -> dict[str, Any]:
    """Match operand types against slots; raises Mismatch.

    The result maps size names to Dims, "*names" to tuples of Dims, and operand names to their Type (a list for `xs*`).
    """
    env: dict[str, Any] = {}
    slots = present(slots, types)
    minimum = sum(1 for s in slots if not s.optional and not s.many)
    many = any(s.many for s in slots)
    if len(types) < minimum or (not many and len(types) > len(slots)):
        raise Mismatch(f"{op} takes {minimum}{' or more' if many else ''} operands, not {len(types)}")
    rest = list(types)
    for slot in slots:
        if slot.many:
            env[slot.name], rest = rest, []
            for ty in env[slot.name]:
                _check_dtype(op, slot, ty, env)
        elif rest:
            _unify(op, slot, rest.pop(0), env)
    return env


def _fail(op: str, slot: Slot, ty: Type, why: str) -> Mismatch:
    return Mismatch(f"{op}: operand {slot.name}: {ty} does not fit {slot.dtype}[{', '.join(slot.dims)}]: {why}")


def _check_dtype(op: str, slot: Slot, ty: Type, env: dict[str, Any]) -> None:
    """Raise Mismatch unless dtype, state and quantisation of an operand fit its slot."""
    if slot.state != ty.state:
        raise _fail(op, slot, ty, "it is a state" if ty.state else "it is not a state")
    if ty.format is not None and slot.dtype not in ("fq", "tq"):
        raise _fail(op, slot, ty, f"{ty.format.name} is quantised")
    kind = DTYPES[ty.dtype].kind
    classes = {"f": "f", "fq": "f", "i": "i", "b": "b"}
    if slot.dtype in classes:
        fits = kind == classes[slot.dtype]
    elif slot.dtype in ("t", "tq"):
        fits = True
    elif isinstance(ref := env.get(slot.dtype), Type):
        fits = ref.dtype == ty.dtype
    else:
        fits = slot.dtype == ty.dtype
    if not fits:
        raise _fail(op, slot, ty, "wrong dtype")


def _unify(op: str, slot: Slot, ty: Type, env: dict[str, Any]) -> None:
    """Match an operand's shape against its slot, binding sizes; a starred dim takes the axes that are left."""
    _check_dtype(op, slot, ty, env)
    env[slot.name] = ty
    starred = next((dim for dim in slot.dims if dim[0] == "*"), None)
    extra = len(ty.shape) - len(slot.dims) + (starred is not None)  # axes of the starred dim
    if extra < 0 or (starred is None and extra):
        raise _fail(op, slot, ty, "wrong rank")
    sizes = list(ty.shape)
    if starred is not None:
        first = slot.dims.index(starred)
        axes = ty.shape[first : first + extra]
        sizes[first : first + extra] = []
    for dim, size in zip([dim for dim in slot.dims if dim is not starred], sizes, strict=True):
        _unify_size(op, slot, ty, env, dim, size)
    if starred is not None and env.setdefault(starred, axes) != axes:
        raise _fail(op, slot, ty, f"{starred} is {list(map(str, env[starred]))}")


def _unify_size(op: str, slot: Slot, ty: Type, env: dict[str, Any], text: str, size: Dim) -> None:
    """Bind a size name or check that an expression equals the size."""
    if text.isidentifier():
        if env.setdefault(text, size) != size:
            raise _fail(op, slot, ty, f"{text} is {env[text]}")
        return
    if Dim.of(text).subs(sizes_of(env)) != size:
        raise _fail(op, slot, ty, f"{size} is not {text}")


def sizes_of(env: Mapping[str, Any]) -> dict[str, Dim]:
    """Return only the entries of a binding that are single sizes."""
    return {k: v for k, v in env.items() if isinstance(v, Dim)}


def expand(dims: Sequence[str], env: Mapping[str, Any]) -> tuple[Dim, ...]:
    """Evaluate a result's dims in a binding."""
    out: list[Dim] = []
    sizes = sizes_of(env)
    for d in dims:
        if d[0] == "*":
            out += env[d]
        else:
            out.append(Dim.of(d).subs(sizes))
    return tuple(out)


def numbers_of(env: Mapping[str, Any]) -> dict[str, Dim]:
    """Return sizes for cost formulas, in which b is the product of the axes `*b`."""
    out = sizes_of(env)
    for k, v in env.items():
        if k[0] == "*":
            out[k[1:]] = product(v)
    return out
