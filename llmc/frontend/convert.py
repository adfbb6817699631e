"""Converts an exported torch graph to an IR graph, node by node, with the aten table."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llmc.diagnostics import Diagnostic
from llmc.frontend.aten_math import Lowering
from llmc.frontend.aten_shape import ALIASES, END, UNLESS_COPIED, joined
from llmc.frontend.aten_table import COMPLEX, TABLE
from llmc.frontend.export import Exported
from llmc.frontend.lowering import PARTS, Call, Sizes, Unsupported
from llmc.frontend.model_folder import KNOWN_TO_WORK
from llmc.ir.graph import Builder, Graph, Module, Value
from llmc.ir.ops import OPS
from llmc.ir.ops.recurrent import PROMPT_OPS
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type, tensor

ATTENTION = ("attention", "alibi_attention")  # the attention ops of a trace


@dataclass(frozen=True)
class Converted:
    """The module with its graph @main, and tied names mapped to the name in use."""

    module: Module
    tied: Mapping[str, str]


def convert(exported: Exported, table: Mapping[str, Lowering] = TABLE) -> Converted:
    """Convert to @main(tokens i32[T], positions i32[T], last i32[R], weights) -> logits [R, V].

    A trace that takes or returns hidden states has an input `hidden` [T, H] and further results [T, H].

    Raises Diagnostic E310 (an op that the table lacks) and E311 (arguments that its lowering does not support).
    """
    nodes = exported.program.graph.nodes
    needed = _needed(nodes)
    converter = _Converter(exported, needed, table)
    for n in nodes:
        if n in needed:
            converter.node(n)
    graph = converter.graph
    for dead in list(reversed(graph.nodes)):
        if not graph.is_used(dead):
            graph.erase(dead)
    _number_layers(graph)
    symbols = {"T": (1, exported.max_tokens), "R": (1, exported.max_rows)}
    return Converted(Module({graph.name: graph}, symbols), converter.tied)


def _needed(nodes: Any) -> set[Any]:
    """Return the nodes that the output needs, with in-place ops on them. This drops detection of packed sequences."""
    needed: set[Any] = set()
    for n in reversed(nodes):
        if n.op == "output" or _in_place(n):
            needed.add(n)
        if n in needed:
            needed.update(n.all_input_nodes)
    return needed


def _in_place(n: Any) -> bool:
    """Whether a node is an in-place op such as aten.div_.Tensor; __and__ and the like are not."""
    space, _, name = str(n.target).partition(".")
    op = name.partition(".")[0]
    return n.op == "call_function" and space == "aten" and op.endswith("_") and not op.endswith("__")


class _Converter:
    """The state of one conversion: maps torch nodes to IR values, symbolic sizes to Dims, and lists to tuples."""

    def __init__(self, exported: Exported, needed: set[Any], table: Mapping[str, Lowering]):
        self.exported, self.table = exported, table
        self.graph = Graph("main")
        self.env: dict[Any, Any] = {}
        model, signature = exported.model, exported.program.graph_signature
        self.specs = {s.arg.name: s for s in signature.input_specs}
        self.tied = tied_names(model)
        placeholders = {n.name: n for n in exported.program.graph.nodes if n.op == "placeholder"}
        ids, last = placeholders["input_ids"], placeholders["logits_to_keep"]
        names = {ids.meta["val"].shape[1].node.expr: "T", last.meta["val"].shape[0].node.expr: "R"}
        self.sizes = Sizes(names)
        self.inputs = {
            "input_ids": self.graph.input("tokens", tensor("i32", "T")),
            "position_ids": self.graph.input("positions", tensor("i32", "T")),
            "logits_to_keep": self.graph.input("last", tensor("i32", "R")),
        }
        if "hidden_states" in placeholders:
            fake = self.sizes.type(placeholders["hidden_states"].meta["val"])
            self.inputs["hidden_states"] = self.graph.input("hidden", tensor(fake.dtype, *fake.shape[1:]))
        self.weights: dict[str, Value] = {}
        self.order = {n: i for i, n in enumerate(exported.program.graph.nodes)}

    def node(self, n: Any) -> None:
        """Convert one torch node and record its value."""
        if n.op == "placeholder":
            self.env[n] = self._placeholder(n)
        elif n.op == "output":
            self._output(n)
        elif n.op == "call_function":
            self.env[n] = self._call(n)
        else:
            raise Diagnostic("E310", f"{n.op} {n.target} cannot be lowered", _REPORT, loc=_loc(n)[0])

    def _placeholder(self, n: Any) -> Any:
        """Return the value of an input: one of the step inputs, or a weight, tied ones under their common name."""
        fake = n.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return fake
        if n.name in self.inputs:
            v = self.inputs[n.name]
            if fake.dim() > v.type.rank:
                return Builder(self.graph, OPS).reshape(v, shape=self.sizes.shape(fake.shape))
            return v
        target = self.specs[n.name].target
        name = self.tied.get(target, target)
        if name not in self.weights:
            self.weights[name] = self.graph.input(name, self.sizes.type(fake), weight=True)
        return self.weights[name]

    def _output(self, n: Any) -> None:
        outputs = [x for x in torch.utils._pytree.tree_leaves(n.args) if x is not None]
        if len(outputs) != 1 + self.exported.num_hidden:
            name = type(self.exported.model).__name__
            raise Diagnostic("E305", f"{name} returns {len(outputs)} tensors instead of logits only", KNOWN_TO_WORK)
        values = [self.env[x] for x in outputs]
        call = Call(Builder(self.graph, OPS), (values[0].type,), self.inputs["position_ids"])
        self.graph.outputs = [call.reshape(v, v.type.shape[1:] if v.type.rank == 3 else v.type.shape) for v in values]

    def _call(self, n: Any) -> Any:
        """Lower a call: sizes become Dims or constants, other calls go through the aten table."""
        fake = n.meta.get("val")
        name = str(n.target)
        loc, module = _loc(n)
        if isinstance(fake, torch.SymInt):
            return self._sized(self.sizes.dim, fake, name, loc)
        if isinstance(fake, int | float | bool):
            return fake
        if n.target.__name__ == "getitem":
            return self.env[n.args[0]][n.args[1]]
        fakes = fake if isinstance(fake, list | tuple) else [fake]
        table = COMPLEX if any(f.dtype in PARTS for f in fakes) else self.table
        lower = table.get(_functional(name) if _in_place(n) else name)
        if lower is None:
            raise _no_lowering(name, loc, module)
        types = tuple(self._sized(self.sizes.type, f, name, loc) for f in fakes)
        call = Call(Builder(self.graph, OPS, loc=loc), types, self.inputs["position_ids"])
        result = self._apply(call, lower, n, name, loc)
        if _in_place(n):
            self._write(call, n, result, name)
        return result

    def _sized(self, rule: Any, fake: Any, name: str, loc: str) -> Any:
        try:
            return rule(fake)
        except Unsupported as e:
            raise Diagnostic("E311", f"{name}: {e}", _REPORT, loc=loc) from e

    def _apply(self, call: Call, lower: Lowering, n: Any, name: str, loc: str) -> Any:
        """Call a lowering; errors become Diagnostic E311, results are cast to torch's dtypes."""
        try:
            out = lower(call, *[self._value(a) for a in n.args], **{k: self._value(a) for k, a in n.kwargs.items()})
            values = out if isinstance(out, tuple) else (out,)
            fixed = tuple(_fit(call, v, t) for v, t in zip(values, call.types, strict=True))
        except (Unsupported, Mismatch, TypeError) as e:
            raise Diagnostic(
                "E311", f"{name}: {e}", f"extend its lowering in llmc/frontend/aten_*.py, or {_REPORT}", loc=loc
            ) from e
        return fixed if isinstance(out, tuple) else fixed[0]

    def _value(self, a: Any) -> Any:
        if isinstance(a, torch.fx.Node):
            return self.env[a]
        if isinstance(a, list | tuple):
            return [self._value(x) for x in a]
        return a

    def _write(self, call: Call, n: Any, value: Value, name: str) -> None:
        """Make later readers of the target of the in-place op `n` see `value`.

        The target is a tensor, a slice of a tensor, or a piece of a split one. A view that was made before the write
        and is read after it would change, too, as would the tensor of which the target is a view: a functional graph
        cannot express that, and it raises Diagnostic E311.
        """
        target = n.args[0]
        whole = target.args[0] if str(target.target) == "aten.slice.Tensor" else target
        users = {u for u in (*whole.users, *target.users) if u is not target}
        read_later = any(self._read_after(u, n) for u in users if _is_view(u) and self.order[u] < self.order[n])
        new: Value | None = value
        if whole is not target:
            defaults = [0, 0, END, 1]  # aten.slice: dim, start, end, step
            passed = list(target.args[1:])
            arguments = passed + defaults[len(passed) :]
            new = joined(call, self.env[whole], value, *map(self._value, arguments))
        if new is None or read_later or self._seen_through(whole, n):
            cause = f"{name}: it writes to a view, and what shares its memory is read as well"
            raise Diagnostic("E311", cause, _REPORT, loc=call.b.loc)
        self.env[target], self.env[whole] = value, new

    def _read_after(self, view: Any, n: Any) -> bool:
        """Whether a view that was made before `n`, or a view of it, is read after `n`."""
        for user in view.users:
            if _is_view(user) and self.order[user] < self.order[n]:
                if self._read_after(user, n):
                    return True
            elif self.order[user] > self.order[n]:
                return True
        return False

    def _seen_through(self, view: Any, n: Any) -> bool:
        """Whether `view` is a view of an input, or of a tensor that is read after `n` other than through `view`.

        The pieces of a split tensor are views that do not overlap.
        """
        while _is_view(view):
            base = view.args[0]
            others = [u for u in base.users if u is not view and (not _is_piece(view) or u.args[1] == view.args[1])]
            if base.op == "placeholder" or any(_is_view(u) or self.order[u] > self.order[n] for u in others):
                return True
            view = base
        return False


def _number_layers(g: Graph) -> None:
    """Number recurrent ops by kind, and attention layers if their numbers repeat: each has a KV cache of its own."""
    for kind in PROMPT_OPS:
        for i, n in enumerate(n for n in g.nodes if n.op.name == kind):
            n.attrs["layer"] = i
    attention_nodes = [n for n in g.nodes if n.op.name in ATTENTION]
    if len({n.attrs["layer"] for n in attention_nodes}) < len(attention_nodes):
        for i, n in enumerate(attention_nodes):
            n.attrs["layer"] = i


def _is_view(n: Any) -> bool:
    """Whether a node's result may share memory with its first operand."""
    if _is_piece(n):
        return _is_view(n.args[0])
    name = str(n.target)
    if name not in UNLESS_COPIED:
        return name in ALIASES
    x, y = n.args[0].meta["val"], n.meta["val"]
    return x.dtype == y.dtype and (name != "aten.contiguous.default" or x.is_contiguous())


def _is_piece(n: Any) -> bool:
    return n.target is operator.getitem


def _fit(call: Call, v: Value, expected: Type) -> Value:
    """Cast a lowering's result to torch's dtype; raises Unsupported if its shape differs from torch's."""
    if v.type.shape != expected.shape:
        raise Unsupported(f"the lowering returned {v.type}, torch {expected}")
    return call.cast(v, expected.dtype)


def _functional(name: str) -> str:
    """Return the name of an in-place op's functional form: aten.div_.Tensor -> aten.div.Tensor."""
    space, op, overload = name.split(".")
    return f"{space}.{op.removesuffix('_')}.{overload}"


def tied_names(model: Any) -> dict[str, str]:
    """Map the names of shared parameters to the first name of the same parameter."""
    first: dict[int, str] = {}
    tied = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if (owner := first.setdefault(id(p), name)) != name:
            tied[name] = owner
    return tied


def _loc(n: Any) -> tuple[str, str]:
    """Return the module path and module class of a node."""
    stack = n.meta.get("nn_module_stack")
    if not stack:
        return "", ""
    path, cls = list(stack.values())[-1]
    return path, cls if isinstance(cls, str) else cls.__name__


_REPORT = "report the model and this message"


def _no_lowering(name: str, loc: str, module: str) -> Diagnostic:
    known = "llmc/frontend/aten_math.py (it computes) or aten_shape.py (it moves data)"
    return Diagnostic(
        "E310",
        f"{name} ({module.rsplit('.', 1)[-1] or 'top level'}) has no row in the aten table",
        f'add one line to LOWERINGS in {known}: "{name}": lambda c, x: c.b.OP(x), with an op that `llmc ops` lists',
        loc=loc,
    )
