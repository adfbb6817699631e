"""Extracts the activation between the two products of an MoE expert by tracing the model's own code.

The result is one scalar expression of gate and up, and the order in which gate_up stores the two. For experts without a
gate, it is an expression of the only value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from llmc.diagnostics import Diagnostic
from llmc.frontend.aten_table import TABLE
from llmc.frontend.lowering import Call, Sizes, Unsupported
from llmc.ir.graph import Builder, Graph, Node, Value
from llmc.ir.ops import OPS
from llmc.ir.ops.moe import parts
from llmc.ir.scalar import E, arg, expr, substitute
from llmc.ir.signature import Mismatch
from llmc.ir.types import tensor

EXAMPLE_COLUMNS = 3  # columns of gate and of up in the traced example


@dataclass(frozen=True)
class Gate:
    """An expert's activation: an expression of the gate a0 and up a1, and the column order of gate_up.

    Without a gate, it is an expression of a0. If `interleaved`, gate and up columns alternate, starting with a gate;
    otherwise all gates precede all ups.
    """

    body: str
    interleaved: bool


def read(module: Any) -> Gate:
    """Trace the activation of an experts module; raises Diagnostic E305 if it is not an elementwise function.

    It is `_apply_gate`, or `act_fn` if the module has no gate.
    """
    try:
        _check_without_weights(getattr(module, "act_fn", None))
        return _of_gate_and_up(module._apply_gate) if has_gate(module) else _of_one(module.act_fn)
    except (Unsupported, Mismatch, KeyError, TypeError) as e:
        raise Diagnostic(
            "E305",
            f"{type(module).__name__}: its experts' gate is not a single expression: {e}",
            "supported: any pointwise function of gate and up, each a half of gate_up or every other column of it, or "
            "of up if there is no gate",
        ) from e


def _check_without_weights(activation: Any) -> None:
    if isinstance(activation, torch.nn.Module) and any(True for _ in activation.parameters()):
        raise Unsupported(f"{type(activation).__name__} has weights of its own")


def has_gate(module: Any) -> bool:
    """Whether an experts module has a gate; transformers says so only of those that have none."""
    return bool(getattr(module, "has_gate", True))


def _of_gate_and_up(function: Callable[[Tensor], Tensor]) -> Gate:
    graph = _lowered(function, 2 * EXAMPLE_COLUMNS)
    turns = {n.attrs["step"] == 2 for n in graph.nodes if n.op.name == "slice"}
    if len(turns) != 1:
        raise Unsupported("the order of gate and up is unknown")
    body = str(_expression(graph, {}))
    if parts(body) != 2:
        raise Unsupported(f"{body} does not read both gate and up")
    return Gate(body, turns.pop())


def _of_one(function: Callable[[Tensor], Tensor]) -> Gate:
    graph = _lowered(function, EXAMPLE_COLUMNS)
    (x,) = graph.inputs
    return Gate(str(_expression(graph, {x: arg(0)})), False)


def _lowered(function: Callable[[Tensor], Tensor], columns: int) -> Graph:
    """Trace a function of a row, and lower it to IR with the aten table."""
    with torch.device("cpu"):
        traced = make_fx(lambda x: function(x), pre_dispatch=True)(torch.zeros(1, columns)).graph
    g = Graph("gate")
    env: dict[Any, Any] = {}
    x = g.input("x", tensor("f32", 1, columns))
    for n in traced.nodes:
        if n.op == "placeholder":
            env[n] = x
        elif n.op == "output":
            g.outputs = [env[n.args[0]]]
        elif n.target.__name__ == "getitem":
            env[n] = env[n.args[0]][n.args[1]]
        else:
            env[n] = _call(g, n, env)
    return g


def _call(g: Graph, n: Any, env: dict[Any, Any]) -> Any:
    fakes = n.meta["val"] if isinstance(n.meta["val"], list | tuple) else [n.meta["val"]]
    call = Call(Builder(g, OPS), tuple(Sizes({}).type(f) for f in fakes), next(iter(g.inputs)))
    arguments = torch.fx.node.map_arg((n.args, dict(n.kwargs)), lambda a: env[a])
    lower = TABLE.get(str(n.target))
    if lower is None:
        raise Unsupported(f"{n.target} has no row in the aten table")
    return lower(call, *arguments[0], **arguments[1])


def _expression(g: Graph, done: dict[Value, E]) -> E:
    """Return the output as a scalar expression: slices of the input are its arguments, all other ops are pointwise.

    done: the expressions of known values, to which those of all nodes are added.
    """
    for n in g.nodes:
        done[n.result] = _part(n) if n.op.name == "slice" else _of(n, done)
    return done[g.outputs[0]]


def _of(n: Node, done: dict[Value, E]) -> E:
    if n.op.name == "constant":
        return expr(n.attrs["value"])
    if n.op.name == "cast":
        return done[n.operands[0]]
    if n.op.scalar is None:
        raise Unsupported(f"{n.op.name} is not pointwise")
    return substitute(n.op.scalar(n.attrs), [done[v] for v in n.operands])


def _part(n: Node) -> E:
    """Whether a slice of the input's last axis is the gate (argument 0) or up (argument 1)."""
    start = n.attrs["start"].const
    step = n.attrs["step"]
    width = n.result.type.shape[-1].const
    starts = {1: (0, EXAMPLE_COLUMNS), 2: (0, 1)}.get(step, ())
    if n.operands[0].node is not None or width != EXAMPLE_COLUMNS or start not in starts:
        raise Unsupported(
            f"columns {n.attrs['start']}, {step} apart, {width} of {2 * EXAMPLE_COLUMNS}, are neither gate nor up"
        )
    return arg(starts.index(start))
