"""The problem of a Triton product, and the generated functions of its epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from llmc.codegen.backends.triton.template import function, literal, record
from llmc.codegen.backends.triton.tiling import masked
from llmc.codegen.backends.triton.triton_expr import helpers, inline
from llmc.codegen.backends.triton.triton_kernel import CODES, Unit, unsupported
from llmc.codegen.product import ConstantProduct
from llmc.ir.dim import D
from llmc.ir.dtype import DTYPES, FLOATS
from llmc.ir.graph import Node
from llmc.ir.scalar import parse_expr, walk
from llmc.ir.types import Type
from llmc.passes.analysis import Origin, origin
from llmc.targets.target import Target

MAX_PARTS = 4


class Product(ConstantProduct):
    """The computation of a product node: y[m, n] = body(x @ w_0.T, .., x @ w_{parts-1}.T, extras)."""

    @property
    def first_extra(self) -> int:
        """The index of the first epilogue operand; in norm_linear the norm's gain precedes them."""
        return 3 if self.node.op.name == "norm_linear" else 2

    @property
    def weight_before_wait(self) -> bool:
        """Whether the weight may be read before the previous kernels have completed."""
        return origin(self.node.operands[1]) is not Origin.INPUTS

    @property
    def splits(self) -> int:
        """The number of parts of the depth whose products linear_split returns; 0 for other ops."""
        return int(self.node.attrs.get("splits", 0))

    @property
    def unsplit(self) -> Product:
        """The product that costs as much as all parts of the depth: one part, with more columns."""
        return _UnsplitProduct(self.node) if self.splits else self

    def tokens(self, env: Mapping[str, int]) -> int:
        """Return the number of tokens at the sizes `env`."""
        return int(self.m.subs(env))

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weight."""
        return self.parts * self.n * self.k * DTYPES[self.w.dtype].bits // 8

    def bytes(self, env: Mapping[str, int]) -> int:
        """Return the bytes of operands and results, each counted once."""
        return sum(int(v.type.nbytes.subs(env)) for v in [*self.node.operands, *self.node.results])

    @property
    def dot(self) -> str:
        """The dtype of both factors in tl.dot: their own if equal, else float32."""
        return self.x.dtype if self.x.dtype == self.w.dtype else "f32"

    @property
    def factor_bytes(self) -> int:
        """The bytes of an element of a factor in tl.dot."""
        return DTYPES[self.dot].bits // 8

    def sums(self, float32_factors: bool) -> str:
        """Return the Triton dtype of tl.dot's sums."""
        return "tl.int32" if self.dot == "i8" and not float32_factors else "tl.float32"


class _UnsplitProduct(Product):
    @cached_property
    def n(self) -> int:
        return int(self.w.shape[0]) * self.splits

    @cached_property
    def k(self) -> int:
        return int(self.x.shape[-1]) // self.splits


def reject_weight(node: Node) -> str | None:
    """Return why the sizes [rows, columns of x] or the parts of a product's weight are not supported, or None."""
    rows = node.operands[1].type.shape[0]
    columns = node.operands[0].type.shape[-1]
    if rows.const is None or columns.const is None:
        return f"the weight's sizes {rows} x {columns} are not constant"
    parts = node.attrs.get("parts", 1)
    return None if 1 <= parts <= MAX_PARTS else f"{parts} parts; the maximum is {MAX_PARTS}"


def reject_product(node: Node, target: Target) -> str | None:
    """Return why no Triton product kernel supports the node on the target, or None."""
    if why := unsupported(node, (*FLOATS, *CODES), target):
        return why
    if why := reject_weight(node):
        return why
    p = Product(node)
    if {p.x.dtype, p.w.dtype} & {*CODES} and p.w.dtype != p.x.dtype:
        return f"factors of {p.x.dtype} and {p.w.dtype}"
    if any(t.dtype not in FLOATS for t in [p.out, *p.extras]):
        return "the result or an operand of the epilogue is not of a float dtype"
    return None


class ExtraOffset(NamedTuple):
    """The offset of an operand of the epilogue at `token` (int64) and `column`, as an expression in Triton.

    by_token, by_column: whether the operand varies along the tokens and along the columns of the result.
    """

    text: str
    by_token: bool
    by_column: bool


def extra_offset(u: Unit, p: Product, extra: Type) -> ExtraOffset:
    """Return the offset of an operand of the epilogue; it is broadcast to the result's shape."""
    outer = list(p.out.shape[:-1])
    extra_outer = [D(1)] * (p.out.rank - max(1, extra.rank)) + list(extra.shape[:-1])
    by_token = any(size.const != 1 for size in extra_outer)
    by_column = extra.rank > 0 and extra.shape[-1] == p.out.shape[-1] and extra.shape[-1].const != 1
    width = D(p.n if by_column else 1)
    terms = ["column"] if by_column else []
    if by_token and extra_outer == outer:
        terms.append(f"token * {width}")
    else:
        extra_stride, stride = width, D(1)  # strides of an axis: in the operand, and among the tokens
        for extra_size, size in zip(reversed(extra_outer), reversed(outer), strict=True):
            if extra_size.const != 1:
                terms.append(f"token // {u.sizes(stride)} % {u.sizes(size)} * {u.sizes(extra_stride)}")
                extra_stride = extra_stride * extra_size
            stride = stride * size
    return ExtraOffset(" + ".join(terms) or "0", by_token, by_column)


def extra_operands(u: Unit, p: Product) -> tuple[str, ...]:
    """Return the operands of the generated `load_extras`: the pointers, then the run-time sizes that it needs."""
    return (*(f"x{i + p.first_extra}" for i in range(len(p.extras))), *_extra_sizes(u, p)[1])


def output(u: Unit, p: Product, rows: int) -> str:
    """Return the argument `output` of a product, an `Output`. rows: tokens of a tile."""
    return record(
        "Output", out_ptr="y0", extra_ptrs=extra_operands(u, p), M=u.sizes(p.m), N=p.n,
        WHOLE_M=p.m.divisible(rows), LOAD_EXTRAS="load_extras", EPILOGUE="epilogue",
    )  # fmt: skip


def epilogue(u: Unit, p: Product) -> str:
    """Generate the functions of a product's epilogue, `load_extras` and `epilogue`, and their helpers."""
    called = helpers(e.fn for e in walk(parse_expr(p.body))).strip()
    return "\n\n\n".join(filter(None, (called, _load_extras(u, p), _epilogue(p))))


def _extra_sizes(u: Unit, p: Product) -> tuple[list[ExtraOffset], tuple[str, ...]]:
    """Return the offsets of the extras, and the names of the run-time sizes in them."""
    offsets = [extra_offset(u, p, e) for e in p.extras]
    names = {word for offset in offsets for word in offset.text.split()}
    return offsets, tuple(f"s{i}" for i in range(len(u.sizes.dims)) if f"s{i}" in names)


def _load_extras(u: Unit, p: Product) -> str:
    """Generate the function that loads the other operands of the epilogue for a tile, each in its own dtype."""
    offsets, sizes = _extra_sizes(u, p)
    names = [*(f"x{i + p.first_extra}" for i in range(len(p.extras))), *sizes]
    lines = [f"{literal(tuple(names))} = operands"] if names else []
    for i, offset in enumerate(offsets):
        mask = masked("token_mask" if offset.by_token else "", "column_mask" if offset.by_column else "", other="0.0")
        lines.append(f"q{i} = tl.load(x{i + p.first_extra} + {offset.text}{mask})")
    lines.append(f"return {literal(tuple(f'q{i}' for i in range(len(p.extras))))}")
    return function(
        "load_extras(operands, token, column, token_mask, column_mask)",
        "Load the other operands of the epilogue at `token` and `column`; zeros outside of the masks.",
        lines,
    )


def _epilogue(p: Product) -> str:
    """Generate the function that computes the result from the sums, in float32."""
    accs = tuple(f"a{i}" for i in range(p.parts))
    extras = tuple(f"q{i}" for i in range(len(p.extras)))
    sums = [f"{a}.to(tl.float32)" if p.sums(False) == "tl.int32" else a for a in accs]
    statements, value = inline(parse_expr(p.body), [*sums, *(f"{q}.to(tl.float32)" for q in extras)])
    meaning = f"{p.body}; a{p.parts} and on are the extras q0 and on" if extras else p.body
    lines = [f"{literal(accs)} = sums", *([f"{literal(extras)} = extras"] if extras else []), *statements]
    return function("epilogue(sums, extras)", f"{meaning}.", [*lines, f"return {value}"])


def peak(p: Product, target: Target) -> float:
    """Return the peak flop/s of tl.dot for this product; float32 factors are multiplied without tensor cores."""
    return target.peaks[p.dot]
