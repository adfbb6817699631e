"""Replaces the recurrent ops of a prompt graph by their forms on device rows, with the states that these need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.ir.opdef import OpDef
from llmc.ir.types import state

# Names of states, followed by the layer: the ring of a convolution's inputs; the memory of a recurrence, the position
# up to which it goes, and the log of the tokens from there on.
STATES = RECENT, MEMORY, BASE, LOG = "row.recent.", "row.memory.", "row.base.", "row.log."


@dataclass(frozen=True)
class RecurrentRows:
    """The recurrent ops of one graph. `step`: its rows, starts and positions; `speculate`: tokens that may be rejected.

    `count` is the number of device rows.
    """

    g: Graph
    ops: Mapping[str, OpDef]
    step: tuple[Value, Value, Value]
    count: int
    speculate: int

    def replace(self, n: Node) -> list[Value]:
        """Replace one node; return the new versions of its states."""
        b = Builder(self.g, self.ops, before=n, loc=n.loc)
        out, states = _REPLACE[n.op.name](self, b, n)
        self.g.replace(n.result, out)
        self.g.erase(n)
        return states

    def conv(self, b: Builder, n: Node) -> tuple[Value, list[Value]]:
        """Return the result and the state of a causal_conv."""
        x, weight, _, *bias = n.operands
        channels, width = weight.type.shape
        kind = state(x.type.dtype, self.count, width + self.speculate, channels)
        y, ring = b.row_conv(x, weight, self.g.input(f"{RECENT}{n.attrs['layer']}", kind), *self.step, *bias)
        return y, [ring]

    def recurrence(self, b: Builder, n: Node) -> tuple[Value, list[Value]]:
        """Return the result and the states of a linear_recurrence."""
        q, k, v, decay, _, *beta = n.operands
        layer, (_, g, d), (_, h, e) = n.attrs["layer"], k.type.shape, v.type.shape
        memory = self.g.input(f"{MEMORY}{layer}", state("f32", self.count, h, d, e))
        if not self.speculate:
            y, memory = b.row_recurrence(q, k, v, decay, memory, *self.step, *beta)
            return y, [memory]
        base = self.g.input(f"{BASE}{layer}", state("i32", self.count))
        log = self.g.input(
            f"{LOG}{layer}", state("f32", self.count, self.speculate, g * d + h * e + h + decay.type.shape[1])
        )
        y, memory = b.row_recurrence_draft(q, k, v, decay, memory, base, log, *self.step, *beta)
        return y, [memory, *b.row_log(k, v, decay, base, log, *self.step, *beta)]


_REPLACE: Mapping[str, Callable[[RecurrentRows, Builder, Node], tuple[Value, list[Value]]]] = MappingProxyType(
    {"causal_conv": RecurrentRows.conv, "linear_recurrence": RecurrentRows.recurrence}
)
