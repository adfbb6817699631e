"""The base class of C++ kernels, and helpers of their emitters: dtypes and inlining of headers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import ClassVar

from llmc_runtime.format.row_abi import DRAFT_COLUMNS, MAX_DRAFTS
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS, INT_COLUMNS

from llmc.codegen.backends.cpp import sampling_rules
from llmc.codegen.emit import Sizes, describe, indent, unsupported_dtype
from llmc.codegen.kernel import Kernel, Schedule, Source
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.ir.types import Type
from llmc.targets.target import Target

CTYPES = MappingProxyType(
    {
        "f32": "float", "bf16": "bf16", "f16": "f16", "i64": "int64_t", "i32": "int32_t",
        "i16": "int16_t", "i8": "int8_t", "u32": "uint32_t", "u16": "uint16_t", "u8": "uint8_t", "bool": "b8",
    }
)  # fmt: skip

_INCLUDE = re.compile(r'^#include "([\w.]+)"[^\n]*\n', re.M)


HEADERS = "llmc.codegen.backends.cpp.kernels"  # the package of llmc's own headers


def row_columns() -> str:
    """Return the columns of a device row's parameters as C++ enums, from the runtime's declarations."""
    enums = [f"enum {{ {', '.join(names).upper()} }};" for names in (FLOAT_COLUMNS, INT_COLUMNS, DRAFT_COLUMNS)]
    drafts_max = f"constexpr int DRAFTS_MAX = {MAX_DRAFTS};  // tokens that can be drafted for a row in a step"
    return "\n".join(["namespace llmc {", *enums, drafts_max, "}", ""])


def pool_layout() -> str:
    """Return the number of the layout of thread pools as a C++ macro: a hash of the headers that declare it."""
    text = "".join(_header((HEADERS,), name) for name in ("llmc_abi.h", "llmc_pool.h", "llmc_group.h"))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
    return f"#define LLMC_LAYOUT INT64_C({number})\n"


# Headers that are generated instead of read from a package.
GENERATED: Mapping[str, Callable[[], str]] = MappingProxyType(
    {"llmc_row_columns.h": row_columns, "llmc_sampling_rules.h": sampling_rules.header, "llmc_layout.h": pool_layout}
)


@lru_cache(maxsize=64)
def _header(packages: tuple[str, ...], name: str) -> str:
    if name in GENERATED:
        return GENERATED[name]()
    for package in packages:
        if (path := resources.files(package).joinpath(name)).is_file():
            return path.read_text()
    raise FileNotFoundError(f"no header {name} in {', '.join(packages)}")


def inline_headers(text: str, packages: tuple[str, ...] = (HEADERS,)) -> str:
    """Replace every `#include "x.h"` by the header's text between marker lines, each header once.

    A header is searched for in `packages`, in order. Raises FileNotFoundError.
    """
    done: set[str] = set()

    def expand(m: re.Match[str]) -> str:
        name = m[1]
        if name in done:
            return ""
        done.add(name)
        body = _INCLUDE.sub(expand, _header(packages, name))
        return f"// ---- {name}\n{body.rstrip()}\n// ---- end of {name}\n"

    return _INCLUDE.sub(expand, text)


def without_headers(text: str) -> str:
    """Undo `inline_headers`, for golden files."""
    return re.sub(r"^// ---- ([\w.]+)\n.*?^// ---- end of \1\n", r'#include "\1"\n', text, flags=re.M | re.S)


def ctype(t: Type) -> str:
    """Return the C++ type of a tensor's elements."""
    return CTYPES[t.dtype]


def unsupported(node: Node, dtypes: Sequence[str] = tuple(CTYPES)) -> str | None:
    """Return which operand or result of the node has none of these dtypes, as a reason; None if all have one."""
    return unsupported_dtype(node, dtypes)


class CppKernel(Kernel):
    """Base class of C++ kernels: `body` returns the statements of the kernel function; the rest is common."""

    headers: ClassVar[tuple[str, ...]] = ("llmc_abi.h",)
    packages: ClassVar[tuple[str, ...]] = (HEADERS,)  # packages to search for headers; an extension puts its own first
    dtypes: ClassVar[tuple[str, ...]] = tuple(CTYPES)  # supported dtypes of operands and results

    def reject(self, node: Node, target: Target) -> str | None:
        """Return why this kernel cannot run the node, or None."""
        return unsupported(node, self.dtypes)

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        """Return the statements of the kernel function, in which `ctx`, `args` and `sizes` are in scope."""
        raise NotImplementedError

    def helpers(self, node: Node, schedule: Schedule, target: Target) -> str:
        """Return the definitions that precede the kernel function."""
        return ""

    def scratch(self, node: Node, schedule: Schedule, target: Target) -> Dim:
        """Return the scratch memory that each thread needs, in bytes."""
        return D(0)

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        """Return the complete, self-contained C++ source."""
        sizes = Sizes()
        body = self.body(node, schedule, target, sizes).rstrip()
        helpers = self.helpers(node, schedule, target)
        entry = f"llmc_{node.op.name}"
        head = describe(self.name, node, schedule, sizes)
        includes = "".join(f'#include "{h}"\n' for h in self.headers)
        namespace = "using namespace llmc;\n" if any(h != "llmc_abi.h" for h in self.headers) else ""
        text = (
            f"// {head}\n{includes}{namespace}{helpers}"
            f'extern "C" __attribute__((visibility("default")))\n'
            f"void {entry}(const llmc_ctx* ctx, void* const* args, const int64_t* sizes) {{\n{indent(body)}\n}}\n"
        )
        text = inline_headers(text, self.packages)
        return Source(entry, "cpp", text, tuple(sizes.dims), self.scratch(node, schedule, target))


def pointers(node: Node) -> str:
    """Declare typed pointers x0, x1, ... to the operands and y0, ... to the results."""
    lines = [f"const {ctype(v.type)}* x{i} = (const {ctype(v.type)}*)args[{i}];" for i, v in enumerate(node.operands)]
    n = len(node.operands)
    lines += [f"{ctype(v.type)}* y{i} = ({ctype(v.type)}*)args[{n + i}];" for i, v in enumerate(node.results)]
    return "\n".join(lines)


class Call(CppKernel):
    """Base class of kernels that are one call of a C++ function: `function(ctx, results, operands, numbers)`.

    An operand whose next version is a result is not passed.
    """

    function: ClassVar[str] = ""  # the op's name if it is empty
    # The last arguments, as names in one text: attributes, and sizes in terms of the op's signature, such as "r-1". A
    # mapping has a text for each op.
    numbers: ClassVar[str | Mapping[str, str]] = ""

    def operands(self, node: Node, sizes: Sizes) -> list[str]:
        """Return the arguments for the op's operands."""
        slots = node.op.slots([v.type for v in node.operands])
        return [f"x{i}" for i, slot in enumerate(slots) if slot.name not in node.op.writes]

    def number_texts(self, node: Node, sizes: Sizes) -> list[str]:
        """Return `numbers` as C++ expressions."""
        names = self.numbers if isinstance(self.numbers, str) else self.numbers[node.op.name]
        known = node.op.sizes([v.type for v in node.operands], node.attrs)
        return [_number(node.attrs.get(name), Dim.of(name).subs(known), sizes) for name in names.split()]

    def body(self, node: Node, schedule: Schedule, target: Target, sizes: Sizes) -> str:
        results = [f"y{i}" for i in range(len(node.results))]
        values = [*results, *self.operands(node, sizes), *self.number_texts(node, sizes)]
        return f"{pointers(node)}\n{self.function or node.op.name}(ctx, {', '.join(values)});"


def _number(attribute: object, size: Dim, sizes: Sizes) -> str:
    if isinstance(attribute, bool):
        return str(attribute).lower()
    return f"{attribute!r}f" if isinstance(attribute, float) else sizes(size)
