"""What the Triton emitters share: dtypes, parameters, the entry function, dependent launches; no kernel, no compiler.

A kernel's text is one Python module with one jitted entry. Parameters are `x0, x1, ...` (operands), `y0, ...` (results;
a state's next version is its operand's memory) and `s0, ...` (dynamic sizes, i32); shapes are literals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.emit import Sizes, describe, indent, refused
from llmc.codegen.kernel import LATE, SETTLED, Kernel, Map, Schedule, Source
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.ir.types import Type
from llmc.targets.target import Target

# How Triton names a stored element, and what pointers to it are called; a bool is one byte, 0 or 1.
ELEMENTS = MappingProxyType(
    {
        "f32": ("tl.float32", "fp32"), "bf16": ("tl.bfloat16", "bf16"), "f16": ("tl.float16", "fp16"),
        "f64": ("tl.float64", "fp64"), "i64": ("tl.int64", "i64"), "i32": ("tl.int32", "i32"),
        "i16": ("tl.int16", "i16"), "i8": ("tl.int8", "i8"), "u32": ("tl.uint32", "u32"),
        "u16": ("tl.uint16", "u16"), "u8": ("tl.uint8", "u8"), "bool": ("tl.int8", "i8"),
    }
)  # fmt: skip
FLOATS = ("f32", "bf16", "f16")
INTS = ("i64", "i32", "i16", "i8", "u32", "u16", "u8")
PDL = "pdl"  # the target's launches may begin before the launch before them has ended
INTERPRET = "interpret"  # not a GPU: Triton's interpreter on the CPU, which has no bfloat16 arithmetic
WAIT = "tl.extra.cuda.gdc_wait()"
GO = "tl.extra.cuda.gdc_launch_dependents()"


@dataclass(frozen=True)
class Code:
    """What a kernel's `code` gives: the entry's statements, programs along x, y, z, and how to compile them.

    `helpers` is module-level text before the entry (jitted functions, `NAME = tl.constexpr(...)`). The parameters that
    `maps` names are tensor descriptors in the text.
    """

    body: str
    grid: tuple[Dim | int, ...]
    helpers: str = ""
    warps: int = 4
    stages: int = 2
    maps: tuple[Map, ...] = ()


@dataclass
class Unit:
    """What an emitter knows while it writes one kernel."""

    node: Node
    schedule: Schedule
    target: Target
    sizes: Sizes = field(default_factory=lambda: Sizes("s{}"))

    @property
    def pdl(self) -> bool:
        return self.target.has(PDL)

    @property
    def interpret(self) -> bool:
        return self.target.has(INTERPRET)

    @property
    def wait(self) -> str:
        """Wait for the launches before this one, and let the next one begin; every program does so exactly once,
        before it touches memory that is not a weight and before it can return. Nothing on targets without it."""
        return f"{WAIT}\n{GO}" if self.pdl else ""

    @property
    def settled(self) -> bool:
        """The operands of `Kernel.early` may be read before the wait."""
        return bool(self.schedule.get(SETTLED))

    @property
    def late(self) -> bool:
        """The next launch begins behind this kernel's last load, not at its wait."""
        return bool(self.schedule.get(LATE))

    def pointers(self, operands: str, results: str) -> dict[str, Argument]:
        """Template parameters -> pointers of the node's operands and results, from the parameters' names in order.

        A parameter is None if the node lacks its operand; "-" stands for an operand that has no parameter.
        """
        count = len(self.node.operands)
        inputs = {name: f"x{i}" if i < count else None for i, name in enumerate(operands.split()) if name != "-"}
        return {**inputs, **{name: f"y{i}" for i, name in enumerate(results.split()) if name != "-"}}

    def launch(
        self, template: Template, grid: tuple[Dim | int, ...], warps: int = 0, stages: int = 0,
        generated: Sequence[str] = (), /, **arguments: Argument,
    ) -> Code:  # fmt: skip
        """One call of a template, with DEPENDENT_LAUNCH added to its arguments.

        warps, stages: default to the schedule's, else 4 and 2. generated: texts of functions that `arguments` name;
        empty texts are left out.
        """
        warps = warps or self.schedule.get("warps", 4)
        stages = stages or self.schedule.get("stages", 2)
        call = template.call(**arguments, DEPENDENT_LAUNCH=self.pdl)
        return Code(call, grid, "\n\n\n".join([template.text(), *filter(None, generated)]), warps, stages)

    def dot_operand(self, text: str) -> str:
        """An operand of tl.dot: float32 where the interpreter runs the text (it cannot multiply bfloat16)."""
        return f"{text}.to(tl.float32)" if self.interpret else text


def element(t: Type) -> str:
    """The Triton dtype of a stored element, such as tl.bfloat16."""
    return ELEMENTS[t.dtype][0]


def unsupported(node: Node, dtypes: Sequence[str] = tuple(ELEMENTS)) -> str | None:
    """Why a Triton kernel cannot hold the node's values, or None."""
    return refused(node, dtypes)


@dataclass(frozen=True)
class TritonKernel(Kernel):
    """A kernel in Triton: `code` gives the entry's statements, the rest of the unit is the same for all."""

    language: str = "triton"

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node)

    def code(self, u: Unit) -> Code:
        """The text of the node `u.node` under `u.schedule`; it contains `u.wait` once."""
        raise NotImplementedError

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        u = Unit(node, schedule, target)
        code = self.code(u)
        entry = f"llmc_{node.op.name}"
        head = describe(self.name, node, schedule, u.sizes)
        pointers = [*(f"x{i}" for i in range(len(node.operands))), *(f"y{i}" for i in range(len(node.results)))]
        names = [*pointers, *(f"s{i}" for i in range(len(u.sizes.dims)))]
        helpers = f"{code.helpers.strip()}\n\n\n" if code.helpers.strip() else ""
        body = indent(code.body.rstrip(), 4)
        text = (
            f"# {head}\nimport triton\nimport triton.language as tl\n\n\n{helpers}"
            f"@triton.jit\ndef {entry}({', '.join(names)}):\n{body}\n"
        )
        elements = [ELEMENTS[v.type.dtype][1] for v in [*node.operands, *node.results]]
        types = [f"*{x}" for x in elements]
        for m in code.maps:
            types[m.param] = f"tensordesc<{elements[m.param]}{list(m.box)}>"
        return Source(
            entry,
            "triton",
            text,
            tuple(u.sizes.dims),
            grid=tuple(D(g) for g in (*code.grid, 1, 1, 1)[:3]),
            params=(*types, *("i32" for _ in u.sizes.dims)),
            options=(("num_warps", code.warps), ("num_stages", code.stages)),
            pdl=u.pdl,
            maps=code.maps,
        )
