"""Helpers of the emitters of all languages: sizes by position, the header line of a kernel, strides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D, Dim, product
from llmc.ir.graph import Node
from llmc.ir.types import Type


@dataclass
class Sizes:
    """Prints sizes as expressions: constants as numbers, others by position in the kernel's size array (`form`)."""

    form: str = "sizes[{}]"
    dims: list[Dim] = field(default_factory=list)

    def __call__(self, d: Dim | int) -> str:
        """Print one size."""
        d = D(d)
        if d.const is not None:
            return str(d.const)
        if d not in self.dims:
            self.dims.append(d)
        return self.form.format(self.dims.index(d))

    def text(self, t: Type) -> str:
        """Print a type with dynamic sizes by position, so that nodes that share a kernel have equal texts."""
        return f"{'state ' if t.state else ''}{t.dtype}[{', '.join(self(d) for d in t.shape)}]"


def describe(kernel: str, node: Node, schedule: Schedule, sizes: Sizes) -> str:
    """Return the kernel's header line: kernel, op, types, attributes.

    It has no symbols or locations, because those differ between the nodes that share a kernel.
    """
    ins = ", ".join(sizes.text(v.type) for v in node.operands)
    outs = ", ".join(sizes.text(v.type) for v in node.results)
    attrs = "".join(f" {k}={_attr(v, sizes)}" for k, v in {**node.attrs, **schedule}.items())
    return f"{kernel}: {node.op.name}({ins}) -> {outs}{attrs}".replace("\n", " ").replace("\\", "/")


def _attr(v: object, sizes: Sizes) -> str:
    if isinstance(v, Dim):
        return sizes(v)
    if isinstance(v, tuple):
        return "[" + ", ".join(_attr(x, sizes) for x in v) + "]"
    return str(v)


def indent(text: str, by: int = 2) -> str:
    """Indent the lines of a text, except empty lines and preprocessor directives."""
    return "\n".join(" " * by + s if s and not s.startswith("#") else s for s in text.split("\n"))


def unsupported_dtype(node: Node, dtypes: Sequence[str], besides: Sequence[int] = ()) -> str | None:
    """Return why a kernel of these dtypes does not support the node's values, or None.

    besides: the operands that may have other dtypes.
    """
    for v in [*(v for i, v in enumerate(node.operands) if i not in besides), *node.results]:
        if v.type.format is not None:
            return f"operand type {v.type} is quantised"
        if v.type.dtype not in dtypes:
            return f"dtype {v.type.dtype} is not among {', '.join(dtypes)}"
    return None


def strided_view(node: Node) -> tuple[list[Dim], Dim]:
    """Return (strides of the result's axes, first offset) in operand 0 of a transpose or slice, in elements."""
    shape = node.operands[0].type.shape
    strides = [product(shape[i + 1 :]) for i in range(len(shape))]
    if node.op.name == "transpose":
        return [strides[axis] for axis in node.attrs["perm"]], D(0)
    axis = node.attrs["axis"] % len(shape)
    start = node.attrs["start"] * strides[axis]
    strides[axis] = strides[axis] * node.attrs["step"]
    return strides, start


def merged(sizes: Sequence[Dim], steps: Sequence[Dim]) -> list[tuple[Dim, Dim]]:
    """Return (size, step) of the axes to iterate over, outermost first.

    Axes of size 1 are dropped, and adjacent axes that are contiguous are merged. There is at least one axis.
    """
    axes: list[tuple[Dim, Dim]] = []
    for size, step in zip(sizes, steps, strict=True):
        if size.const == 1:
            continue
        if axes and axes[-1][1] == step * size:
            axes[-1] = (axes[-1][0] * size, step)
        else:
            axes.append((size, step))
    return axes or [(D(1), D(1))]
