"""A pass is a frozen dataclass with a name; its fields are its options, on the command line too. It keeps no state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from llmc.ir.graph import Module, Node
from llmc.ir.opdef import OpDef

NOBODY: Mapping[str, Any] = MappingProxyType({})


class Place(NamedTuple):
    """Where a rule applied, or nearly did: `why` says what was in the way."""

    rule: str
    op: str
    loc: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.rule}: {self.op} at {self.loc or '?'}: {self.why}"


@dataclass
class Ctx:
    """What a run of passes shares.

    opset: op name -> OpDef. target: the Target compiled for, or None. kernels: kernel name -> Kernel. fuel: how many
    changes may still be made (negative: any number). only: a module path; local rewrites elsewhere are not made.
    misses: near misses, in the order found, each once. hits: how often a local rewrite was made at a place. told: what
    people are told of a pass's decisions. choices: what was chosen among several ways, as data.
    """

    opset: Mapping[str, OpDef]
    target: Any = None
    kernels: Mapping[str, Any] = field(default_factory=lambda: NOBODY)
    fuel: int = -1
    only: str = ""
    misses: dict[Place, None] = field(default_factory=dict)
    hits: Counter[Place] = field(default_factory=Counter)
    told: dict[str, None] = field(default_factory=dict)
    choices: list[dict[str, Any]] = field(default_factory=list)

    def allows(self, node: Node) -> bool:
        """True where the node lies at or under the module path `only`."""
        return not self.only or node.loc == self.only or node.loc.startswith(self.only + ".")

    def spend(self) -> bool:
        """Take one unit of fuel for one change; False when none is left, and the change must not be made."""
        if self.fuel == 0:
            return False
        self.fuel -= 1
        return True

    def miss(self, rule: str, node: Node, why: str) -> None:
        """Tell that `rule` almost applied at `node`."""
        self.misses[Place(rule, node.op.name, node.loc, why)] = None

    def hit(self, rule: str, node: Node) -> None:
        """Tell that `rule` applies at `node`."""
        self.hits[Place(rule, node.op.name, node.loc)] += 1


@dataclass(frozen=True)
class Pass:
    """Subclass as a frozen dataclass: `name` as a class variable, options as fields with defaults, a docstring that
    says what it does, and `run`."""

    name: ClassVar[str]

    def run(self, m: Module, ctx: Ctx) -> int:
        """Change the module in place; answer how many changes were made."""
        raise NotImplementedError
