"""The base class of passes, the context that a run of passes shares, and the kernels' reasons to reject a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from llmc.diagnostics import Diagnostic, extension_code
from llmc.ir.graph import Graph, Module, Node
from llmc.ir.opdef import OpDef

NO_KERNELS: Mapping[str, Any] = MappingProxyType({})


class Place(NamedTuple):
    """A place where a rule applied or nearly applied; for a near miss, `why` names the obstacle."""

    rule: str
    op: str
    loc: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.op} at {self.loc or '?'}: {self.why}"


@dataclass
class Ctx:
    """The context that a run of passes shares.

    opset: op name -> OpDef. target: the Target to compile for, or None. kernels: kernel name -> Kernel. fuel: the
    maximum number of further changes (negative: unlimited). only: a module path; rewrites elsewhere are skipped.
    misses: near misses in order, without repetition. hits: number of rewrites per place. notes: messages for the user,
    without repetition. choices: the kernel choices and their alternatives, as data for the report.
    """

    opset: Mapping[str, OpDef]
    target: Any = None
    kernels: Mapping[str, Any] = field(default_factory=lambda: NO_KERNELS)
    fuel: int = -1
    only: str = ""
    misses: dict[Place, None] = field(default_factory=dict)
    hits: Counter[Place] = field(default_factory=Counter)
    notes: dict[str, None] = field(default_factory=dict)
    choices: list[dict[str, Any]] = field(default_factory=list)

    def allows(self, node: Node) -> bool:
        """Whether the node is at or below the module path `only`."""
        return not self.only or node.loc == self.only or node.loc.startswith(self.only + ".")

    def spend(self) -> bool:
        """Consume one unit of fuel. If this returns False, the change must not be made."""
        if self.fuel == 0:
            return False
        self.fuel -= 1
        return True

    def miss(self, rule: str, node: Node, why: str) -> None:
        """Record that `rule` almost applied at `node`, and why it did not."""
        self.misses[Place(rule, node.op.name, node.loc, why)] = None

    def hit(self, rule: str, node: Node) -> None:
        """Record that `rule` applied at `node`."""
        self.hits[Place(rule, node.op.name, node.loc)] += 1


@dataclass(frozen=True)
class Pass:
    """Base class of passes. A pass has no state.

    A subclass is a frozen dataclass with the class variable `name`, its options as fields with defaults, a docstring
    that describes it (`llmc passes` prints it), and `graph` or, if it needs the whole module, `run`.
    """

    name: ClassVar[str]

    def run(self, m: Module, ctx: Ctx) -> int:
        """Transform the module in place and return the number of changes; by default, transform every graph."""
        return sum(self.graph(g, ctx) for g in m.graphs.values())

    def graph(self, g: Graph, ctx: Ctx) -> int:
        """Transform one graph in place and return the number of changes."""
        raise NotImplementedError


class NoMatch(Exception):
    """Raised by passes that match by hand if a node does not match; the message is the reason."""


class NodePass(Pass):
    """Base class of passes that visit the nodes of some ops, in all graphs. A subclass has `ops` and `node`.

    Nodes outside of the module path `Ctx.only` are skipped, and so are nodes that the pass itself adds. If `node`
    raises NoMatch, the node stays, and its reason is recorded as a near miss of the pass.
    """

    ops: ClassVar[tuple[str, ...]]

    def run(self, m: Module, ctx: Ctx) -> int:
        """Visit the nodes; return the number of changes."""
        done = 0
        for g, n in m.find(*self.ops):
            try:
                done += self.node(m, g, n, ctx) if ctx.allows(n) else 0
            except NoMatch as why:
                ctx.miss(self.name, n, str(why))
        return done

    def node(self, m: Module, g: Graph, n: Node, ctx: Ctx) -> int:
        """Rewrite a node of graph `g`; return the number of changes. Raises NoMatch with the reason why not."""
        raise NotImplementedError


def target_of(ctx: Ctx) -> Any:
    """Return the Target to compile for; raises Diagnostic E431 if there is none."""
    if ctx.target is None:
        raise Diagnostic("E431", "this pass needs a target", "pass --target, for example --target cpu:native")
    return ctx.target


def claiming(n: Node, kernels: Mapping[str, Any], target: Any) -> Iterator[Any]:
    """Yield the kernels in the languages of the target that implement the node's op."""
    for name in kernels:
        kernel = kernels[name]  # imports the kernel's module
        if kernel.language in target.languages and kernel.claims(n):
            yield kernel


def rejections(n: Node, ctx: Ctx) -> list[str] | None:
    """Return why each kernel of the target rejects the node; None if one supports it, or if there is no target.

    A kernel whose compiler is not installed rejects every node. A kernel with `opt_in` does not count: `select` uses it
    only for nodes for which it was measured.
    """
    if ctx.target is None:
        return None
    reasons = []
    for kernel in claiming(n, ctx.kernels, ctx.target):
        with extension_code(f"kernel {kernel.name!r}", type(kernel), n):
            why = kernel.reject(n, ctx.target) or kernel.missing() or None
        if why is None and not kernel.opt_in:
            return None
        reasons.append(f"{kernel.name}: {why or 'opt-in'}")
    return reasons


def some_kernel_leads(n: Node, ctx: Ctx, sizes: Mapping[str, int]) -> bool:
    """Whether an installed kernel of the target leads for the node at these sizes of symbols."""
    if ctx.target is None:
        return False
    for kernel in claiming(n, ctx.kernels, ctx.target):
        with extension_code(f"kernel {kernel.name!r}", type(kernel), n):
            usable = kernel.reject(n, ctx.target) is None and not kernel.missing()
            if usable and kernel.leads(n, ctx.target, sizes):
                return True
    return False


def rejected(n: Node, ctx: Ctx) -> str | None:
    """Return why no kernel of the target supports the node, as text; None if one does, or if there is no target."""
    reasons = rejections(n, ctx)
    return None if reasons is None else "; ".join(reasons) or f"target {ctx.target.name} has no kernel for them"
