"""What emitters of every language share: dynamic sizes by position, the line that heads a kernel; no language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmc.codegen.kernel import Schedule
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.ir.types import Type


@dataclass
class Sizes:
    """Sizes as expressions: constants as numbers, the others by their position in the kernel's sizes (`form`)."""

    form: str = "sizes[{}]"
    dims: list[Dim] = field(default_factory=list)

    def __call__(self, d: Dim | int) -> str:
        d = D(d)
        if d.const is not None:
            return str(d.const)
        if d not in self.dims:
            self.dims.append(d)
        return self.form.format(self.dims.index(d))

    def text(self, t: Type) -> str:
        """The type with dynamic sizes by position: equal for nodes that share a kernel."""
        return f"{'state ' if t.state else ''}{t.dtype}[{', '.join(self(d) for d in t.shape)}]"


def describe(kernel: str, node: Node, schedule: Schedule, sizes: Sizes) -> str:
    """One line: kernel, op, types, attributes. No symbol and no place in the model: those differ among users."""
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
    return "\n".join(" " * by + s if s and not s.startswith("#") else s for s in text.split("\n"))


def refused(node: Node, dtypes: Sequence[str]) -> str | None:
    """Why a kernel of these dtypes cannot hold the node's values, or None."""
    for v in [*node.operands, *node.results]:
        if v.type.format is not None:
            return f"operand type {v.type} is quantised"
        if v.type.dtype not in dtypes:
            return f"dtype {v.type.dtype} is not among {', '.join(dtypes)}"
    return None


def merged(sizes: Sequence[Dim], steps: Sequence[Dim]) -> list[tuple[Dim, Dim]]:
    """(size, step) of axes that are walked, outermost first: axes of one element are left out, those that lie behind
    one another are one. At least one axis."""
    axes: list[tuple[Dim, Dim]] = []
    for size, step in zip(sizes, steps, strict=True):
        if size.const == 1:
            continue
        if axes and axes[-1][1] == step * size:
            axes[-1] = (axes[-1][0] * size, step)
        else:
            axes.append((size, step))
    return axes or [(D(1), D(1))]
