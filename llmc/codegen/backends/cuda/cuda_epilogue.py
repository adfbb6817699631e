"""The epilogue of a product in CUDA C++: a generated function of its sums and of other operands.

A kernel's parameters include OTHER_PARAMETERS, and it calls `epilogue(sums, token, column OTHERS)` for every element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, FLOATS
from llmc.codegen.print_expr import VECTOR, Primitives, inline
from llmc.codegen.product import ProductNode
from llmc.ir.scalar import parse_expr
from llmc.ir.types import Type

# Scalar expressions over single floats; kernels/scalar_math.cuh has the functions.
FLOAT: Primitives = MappingProxyType(
    {**VECTOR, "and": ("({0} && {1})", "mm", "m"), "or": ("({0} || {1})", "mm", "m"), "not": ("(!{0})", "m", "m")}
)
# The same over two neighbours, in files that include pairs.cuh.
PAIR: Primitives = MappingProxyType({**FLOAT, "sigmoid": ("fast_sigmoid({0})", "f", "f")})


def offset_of(operand: Type, result: Type) -> str | None:
    """Return the index of an operand's element at `token` and `column` of the result [*b, n]; None if unsupported.

    An operand varies by all leading axes of the result or by none of them.
    """
    shape, leading = list(operand.shape), list(result.shape[:-1])
    columns = bool(shape) and shape[-1] == result.shape[-1]
    if shape and not columns and shape[-1].const != 1:
        return None
    rows = shape[:-1]
    if all(d.const == 1 for d in rows):
        return "column" if columns else "0"
    if rows != leading:
        return None
    return "(long long)token * N + column" if columns else "token"


def reject_operands(operands: Sequence[Type], result: Type) -> str | None:
    """Return why an epilogue with these other operands is not supported, or None."""
    for t in operands:
        if t.dtype not in FLOATS:
            return f"an operand of the epilogue has the dtype {t.dtype}"
        if offset_of(t, result) is None:
            return f"an operand of the epilogue has the type {t} beside the result {result}"
    return None


def reject_product(product: ProductNode, max_parts: int, multiple: int = 8) -> str | None:
    """Return why a product with an epilogue is not supported, or None: its parts, the weight's sizes, or other types.

    The rows of each part are a multiple of 8, the columns one of `multiple`.
    """
    parts, (rows, k), out = product.parts, (d.const for d in product.w.shape), product.out
    if not 1 <= parts <= max_parts:
        return f"{parts} parts; the maximum is {max_parts}"
    if not rows or not k or rows % (8 * parts) or k % multiple:
        return f"the weight's sizes {rows} x {k} are not constant multiples of {8 * parts} and {multiple}"
    if out.dtype not in FLOATS:
        return f"a result of {out.dtype}"
    return reject_operands(product.extras, out)


def operand_macros(operands: Mapping[str, Type], before: Sequence[str] = ()) -> tuple[str, str]:
    """Return the definitions of OTHER_PARAMETERS, OTHER_ARGUMENTS and OTHERS, and the text of OTHER_ARGUMENTS.

    operands: by the names of their parameters. before: parameters that the file uses itself, such as "int* x".
    """
    parameters = [f"const {CTYPES[t.dtype]}* {name}" for name, t in operands.items()]
    arguments = "".join(f", {parameter}" for parameter in parameters)
    definitions = (
        f"#define OTHER_PARAMETERS {''.join(f'{parameter}, ' for parameter in (*before, *parameters))}\n"
        f"#define OTHER_ARGUMENTS {arguments}\n"
        f"#define OTHERS {''.join(f', {name}' for name in operands)}\n"
    )
    return definitions, arguments


def epilogue(p: ProductNode, before: Sequence[str] = ()) -> str:
    """Generate OTHER_PARAMETERS, OTHERS and the function `epilogue` of a product.

    before: parameters that the file uses itself, such as "int* x".
    """
    types = {f"e{i}": t for i, t in enumerate(p.extras)}
    parameters = [f"const {CTYPES[t.dtype]}* {name}" for name, t in types.items()]
    values = [f"to_float({name}[{offset_of(t, p.out)}])" for name, t in types.items()]
    value = inline(parse_expr(p.body), [*(f"a[{i}]" for i in range(p.parts)), *values], FLOAT)
    arguments = "".join(f", {x}" for x in parameters)
    return (
        f"#define OTHER_PARAMETERS {''.join(f'{x}, ' for x in (*before, *parameters))}\n"
        f"#define OTHERS {''.join(f', {name}' for name in types)}\n"
        f"__device__ inline float epilogue(const float (&a)[{p.parts}], int token, int column{arguments}) {{\n"
        f"  return {value};\n}}"
    )


def pair_epilogue(p: ProductNode, before: Sequence[str] = (), staged: int | None = None) -> str:
    """Generate OTHER_PARAMETERS, OTHER_ARGUMENTS, OTHERS, and an epilogue of two neighbouring columns in two functions.

    `load_others(loaded, token, column OTHERS)` loads the other operands, for an even column, into a `Loaded`;
    `epilogue(y, sums, loaded)` computes y[2] from sums[parts][2]. They need pairs.cuh. before: as of `epilogue`.
    staged: the index of an operand that `load_others` leaves out, as the kernel loads it.
    """
    types = {f"e{i}": t for i, t in enumerate(p.extras)}
    macros, arguments = operand_macros(types, before)
    loads = []
    for i, (name, t) in enumerate(types.items()):
        if i == staged:
            continue
        offset = offset_of(t, p.out) or "0"
        if "column" in offset:
            loads.append(f"load_pair(to.{name}, {name} + ({offset}));")
        else:
            loads.append(f"to.{name}[0] = to.{name}[1] = to_float({name}[{offset}]);")
    values = [*(f"a[{part}][i]" for part in range(p.parts)), *(f"x.{name}[i]" for name in types)]
    value = inline(parse_expr(p.body), values, PAIR)
    members = "".join(f" float {name}[2];" for name in types)
    declared = f"Loaded& to, int token, int column{arguments}"
    return (
        f"{macros}"
        f"struct Loaded {{{members} }};\n"
        f"__device__ inline void load_others({declared}) {{ {' '.join(loads)} }}\n"
        f"__device__ inline void epilogue(float (&y)[2], const float (&a)[{p.parts}][2], const Loaded& x) {{\n"
        f"#pragma unroll\n"
        f"  for (int i = 0; i < 2; i++) y[i] = {value};\n}}"
    )
