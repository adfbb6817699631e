"""The base class of Triton kernels: dtypes, parameters, the entry function and dependent launches.

A kernel's text is one Python module with one jitted entry. Its parameters are `x0, x1, ...` (operands), `y0, ...`
(results; the next version of a state is in the memory of its operand), `group` if the kernel exchanges data with other
ranks, and `s0, ...` (run-time sizes, i32). Constant sizes are literals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from llmc.codegen.backends.triton.template import Argument, Template
from llmc.codegen.emit import Sizes, describe, indent, unsupported_dtype
from llmc.codegen.kernel import (
    READ_BEFORE_WAIT,
    TRIGGER_AFTER_LOADS,
    TRIGGER_BEFORE_WAIT,
    Kernel,
    Map,
    Schedule,
    Source,
)
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.ir.types import Type
from llmc.targets.target import PDL, Target

# dtype -> Triton's dtype of a stored element, and its name in pointer types; a bool is one byte, 0 or 1.
ELEMENTS = MappingProxyType(
    {
        "f32": ("tl.float32", "fp32"), "bf16": ("tl.bfloat16", "bf16"), "f16": ("tl.float16", "fp16"),
        "f64": ("tl.float64", "fp64"), "i64": ("tl.int64", "i64"), "i32": ("tl.int32", "i32"),
        "i16": ("tl.int16", "i16"), "i8": ("tl.int8", "i8"), "u32": ("tl.uint32", "u32"),
        "u16": ("tl.uint16", "u16"), "u8": ("tl.uint8", "u8"), "bool": ("tl.int8", "i8"),
        "f8e4m3": ("tl.float8e4nv", "fp8e4nv"), "f8e4m3fnuz": ("tl.float8e4b8", "fp8e4b8"),
    }
)  # fmt: skip
FLOAT8 = ("f8e4m3", "f8e4m3fnuz")
# 8-bit float dtype of the matrix instructions, by architecture
AMD_FLOAT8 = MappingProxyType({"gfx942": "f8e4m3fnuz", "gfx950": "f8e4m3"})
CODES = ("i8", *FLOAT8)  # dtypes of quantised codes; tl.dot multiplies two operands of the same one
INTERPRET = "interpret"  # target feature: Triton's interpreter on the CPU, which has no bfloat16 arithmetic
WAIT = "tl.extra.cuda.gdc_wait()"
LAUNCH_DEPENDENTS = "tl.extra.cuda.gdc_launch_dependents()"


@dataclass(frozen=True)
class Code:
    """The result of `TritonKernel.code`.

    body: statements of the entry function. grid: programs along x, y, z. helpers: module-level text before the entry
    (jitted functions, `NAME = tl.constexpr(...)`). warps, stages: num_warps and num_stages. maps: parameters that are
    tensor descriptors in the text. group: whether the entry has the parameter `group`, the memory of a group of ranks.
    """

    body: str
    grid: tuple[Dim | int, ...]
    helpers: str = ""
    warps: int = 4
    stages: int = 2
    maps: tuple[Map, ...] = ()
    group: bool = False


@dataclass
class Unit:
    """The kernel that is being emitted: node, schedule, target, and the run-time sizes used so far."""

    node: Node
    schedule: Schedule
    target: Target
    sizes: Sizes = field(default_factory=lambda: Sizes("s{}"))

    @property
    def pdl(self) -> bool:
        """Whether the target has programmatic dependent launch."""
        return self.target.has(PDL)

    @property
    def interpret(self) -> bool:
        """Whether the target is Triton's interpreter."""
        return self.target.has(INTERPRET)

    @property
    def wait(self) -> str:
        """The statements that wait for the previous kernels and allow the next one to begin; "" without this feature.

        With TRIGGER_BEFORE_WAIT in the schedule, the next one may begin before the wait.

        Every program executes them exactly once, before it accesses memory other than weights and before it returns.
        """
        if not self.pdl:
            return ""
        return f"{LAUNCH_DEPENDENTS}\n{WAIT}" if self.triggers_before_wait else f"{WAIT}\n{LAUNCH_DEPENDENTS}"

    @property
    def triggers_before_wait(self) -> bool:
        """Whether to allow the next kernel to begin before the wait, since it loads weights before its own."""
        return bool(self.schedule.get(TRIGGER_BEFORE_WAIT))

    @property
    def reads_before_wait(self) -> bool:
        """Whether the operands of `Kernel.reads_before_wait` may be read before the wait."""
        return bool(self.schedule.get(READ_BEFORE_WAIT))

    @property
    def triggers_after_loads(self) -> bool:
        """Whether to allow the next kernel to begin only after this kernel's last load, instead of at the wait."""
        return bool(self.schedule.get(TRIGGER_AFTER_LOADS))

    def pointer(self, operand: str) -> str | None:
        """Return the pointer of the operand of that name in the op's signature, or None if the node lacks it."""
        at = self.node.op.places([v.type for v in self.node.operands]).get(operand)
        return None if at is None else f"x{at}"

    def pointers(self, operands: str, results: str) -> dict[str, Argument]:
        """Map template parameters to the pointers of the op's operands and the node's results, both in order.

        A parameter is None if the node lacks its operand; "-" stands for an operand that has no parameter.
        """
        op, types = self.node.op, [v.type for v in self.node.operands]
        present = op.slots(types)
        lacking = {i for i, slot in enumerate(op.operands) if slot not in present}
        pointers: dict[str, Argument] = {}
        places = iter(range(len(types)))  # positions of the operands that the node has
        for i, name in enumerate(operands.split()):
            place = None if i in lacking else next(places, None)
            if name != "-":
                pointers[name] = None if place is None else f"x{place}"
        for i, name in enumerate(results.split()):
            if name != "-":
                pointers[name] = f"y{i}"
        return pointers

    def launch(
        self, template: Template, grid: tuple[Dim | int, ...], warps: int = 0, stages: int = 0,
        generated: Sequence[str] = (), /, **arguments: Argument,
    ) -> Code:  # fmt: skip
        """Return the code of one call of a template, with DEPENDENT_LAUNCH added to its arguments.

        warps, stages: 0 means the schedule's, or 4 and 2. generated: texts of functions that `arguments` refer to;
        empty texts are skipped.
        """
        warps = warps or self.schedule.get("warps", 4)
        stages = stages or self.schedule.get("stages", 2)
        call = template.call(**arguments, DEPENDENT_LAUNCH=self.pdl)
        return Code(call, grid, "\n\n\n".join([template.text(), *filter(None, generated)]), warps, stages)


def _unsupported_codes(node: Node, target: Target) -> str | None:
    """Return why the target does not support the node's values of 8-bit floats, or None."""
    used = {v.type.dtype for v in [*node.operands, *node.results]} & {*FLOAT8}
    supported = float8(target)
    if not used - {supported}:
        return None
    only = f", only for {supported}" if supported else ""
    return f"{target.name} has no instructions for {min(used)}{only}"


def float8(target: Target) -> str:
    """Return the dtype of 8-bit floats with 3 bits of mantissa of the target's instructions; "" if it has none."""
    if target.family == "cuda":
        return "f8e4m3" if capability(target) >= 89 else ""
    return AMD_FLOAT8.get(target.arch, "")


def capability(target: Target) -> int:
    """Return ten times the compute capability of an NVIDIA target."""
    return int(target.arch.removeprefix("sm_").rstrip("af"))


def element(t: Type) -> str:
    """Return the Triton dtype of stored elements, such as tl.bfloat16."""
    return ELEMENTS[t.dtype][0]


def unsupported(node: Node, dtypes: Sequence[str] = tuple(ELEMENTS), target: Target | None = None) -> str | None:
    """Return which operand or result of the node has none of these dtypes, as a reason; None if all have one.

    With a `target`, also return why it does not support the node's values of 8-bit floats.
    """
    return unsupported_dtype(node, dtypes) or (_unsupported_codes(node, target) if target else None)


def _params(u: Unit, code: Code) -> dict[str, str]:
    """Return the entry's parameters with their Triton types: operands, results, the group's memory, and sizes."""
    node = u.node
    names = [*(f"x{i}" for i in range(len(node.operands))), *(f"y{i}" for i in range(len(node.results)))]
    elements = [ELEMENTS[v.type.dtype][1] for v in [*node.operands, *node.results]]
    types = [f"*{element}" for element in elements]
    for m in code.maps:
        types[m.param] = f"tensordesc<{elements[m.param]}{list(m.box)}>"
    params = dict(zip(names, types, strict=True))
    if code.group:
        params["group"] = "*i64"
    return params | {f"s{i}": "i32" for i in range(len(u.sizes.dims))}


@dataclass(frozen=True)
class TritonKernel(Kernel):
    """Base class of Triton kernels: `code` returns the entry's statements; the rest of the text is common."""

    language: str = "triton"
    waits_first = True
    dtypes: ClassVar[tuple[str, ...]] = tuple(ELEMENTS)  # supported dtypes of operands and results

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported(node, self.dtypes)

    def code(self, u: Unit) -> Code:
        """Return the code of `u.node` under `u.schedule`. It must execute `u.wait` exactly once."""
        raise NotImplementedError

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        u = Unit(node, schedule, target)
        code = self.code(u)
        entry = f"llmc_{node.op.name}"
        head = describe(self.name, node, schedule, u.sizes)
        helpers = f"{code.helpers.strip()}\n\n\n" if code.helpers.strip() else ""
        params = _params(u, code)
        text = (
            f"# {head}\nimport triton\nimport triton.language as tl\n\n\n{helpers}"
            f"@triton.jit\ndef {entry}({', '.join(params)}):\n{indent(code.body.rstrip(), 4)}\n"
        )
        return Source(
            entry,
            "triton",
            text,
            tuple(u.sizes.dims),
            grid=tuple(D(g) for g in (*code.grid, 1, 1, 1)[:3]),
            params=tuple(params.values()),
            options=(("num_warps", code.warps), ("num_stages", code.stages)),
            pdl=u.pdl,
            maps=code.maps,
            group=code.group,
        )
