"""Divides a model over several ranks: each computes with its part of the weights and heads (tensor parallelism).

What follows a recurrence is rewritten first, so that its heads divide: heads get an axis of their own, and norms over
the channels of several heads add up squares, a sum that ranks can complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc_runtime.format.names import NCCL
from llmc_runtime.format.program import RANK

from llmc.diagnostics import Diagnostic
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.signature import Mismatch
from llmc.passes.base import Ctx, Pass
from llmc.passes.fuse.fuse_reduce import FuseReduce
from llmc.passes.fuse.fuse_reduce_norm import FuseReduceNorm
from llmc.passes.lower.finer_blocks import cuttable
from llmc.passes.lower.gather_first import GatherFirst
from llmc.passes.lower.shard_plan import Plan, make_plans
from llmc.passes.lower.shard_rules import RECURRENCES, Relation, Split, is_elementwise, recurrence_of
from llmc.passes.lower.shard_siblings import separate
from llmc.passes.pipeline import require
from llmc.passes.weights.quantize import Quantize
from llmc.targets.target import Target

BEHIND_SUMS = ("fuse-norm-linear", "fuse-norm-quantized", "select")  # the first of these follows fuse-reduce-norm
SHAPED = ("reshape", "broadcast")  # ops with the attribute shape


def prepare(g: Graph, ranks: int, ctx: Ctx) -> int:
    """Rewrite what follows the recurrences whose heads divide over the ranks; return the number of changes."""
    recurrences = [n for n in g.nodes if n.op.name in RECURRENCES and ctx.allows(n) and recurrence_of(n, ranks)]
    if not recurrences:
        return 0
    done = _separate_heads(g, ctx)
    for n in recurrences:
        size = n.results[0].type.shape[2]
        for norm in _norms_after(n.results[0]):
            if norm.operands[1].type.shape[0] != size:
                _open_norm(g, norm, ctx)
                done += 1
    return done


def _separate_heads(g: Graph, ctx: Ctx) -> int:
    """Give the values of shape [heads * tokens, channels] the shape [tokens, heads, channels]; return how many did."""
    divided: dict[Value, Value] = {}
    for n in list(g.nodes):
        b = Builder(g, ctx.opset, before=n, loc=n.loc)
        heads = _merged_heads(n) if n.op.name == "reshape" and n.operands[0] not in divided else None
        if heads is not None:
            x = n.operands[0]
            divided[n.result] = b.reshape(x, shape=(x.type.shape[0], heads, n.result.type.shape[1]))
        elif any(v in divided for v in n.operands):
            _read_divided(b, n, divided)
    for n in reversed(list(g.nodes)):
        if any(v in divided for v in (*n.operands, *n.results)) and not g.is_used(n):
            g.erase(n)
    return len(divided)


def _read_divided(b: Builder, n: Node, divided: dict[Value, Value]) -> None:
    """Let a node read divided values: as they are, if it computes each row or element by itself, else merged again."""
    by_row = is_elementwise(n) or n.op.row_wise
    if n.op.name == "reshape":
        b.graph.replace(n.result, b.reshape(divided[n.operands[0]], shape=n.attrs["shape"]))
    elif by_row and len(n.results) == 1 and all(v in divided or v.type.rank < 2 for v in n.operands):
        divided[n.result] = b.emit(n.op, [divided.get(v, v) for v in n.operands], n.attrs)
    else:
        merged = [b.reshape(divided[v], shape=v.type.shape) if v in divided else v for v in n.operands]
        b.graph.set_operands(n, merged)


def _merged_heads(n: Node) -> Dim | None:
    """Return the number of heads that a reshape merges with the tokens; None if it does not."""
    x, shape = n.operands[0].type, n.result.type.shape
    if len(shape) != 2 or x.shape[0].const is not None or shape[0] == x.shape[0]:
        return None
    heads = x.numel.divide(x.shape[0] * shape[1])
    return heads if heads is not None and shape[0] == x.shape[0] * heads else None


def _norms_after(v: Value) -> list[Node]:
    """Return the norms that a value reaches through reshapes and ops on elements."""
    norms, seen, work = list[Node](), set[Node](), list(v.uses)
    while work:
        n = work.pop()
        if n in seen:
            continue
        seen.add(n)
        if n.op.name == "rms_norm":
            norms.append(n)
        elif is_elementwise(n) or n.op.name == "reshape":
            work += n.result.uses
    return norms


def _open_norm(g: Graph, n: Node, ctx: Ctx) -> None:
    """Compute an rms_norm in single ops, rounded once as before."""
    b = Builder(g, ctx.opset, before=n, loc=n.loc)
    (x, w), dtype = n.operands, n.result.type.dtype
    if dtype != "f32":
        x = b.cast(x, dtype="f32")
    if w.type.dtype != "f32":
        w = b.cast(w, dtype="f32")
    total = b.sum(b.square(x), axis=-1, keepdim=True)
    mean = b.mul(total, b.constant(1 / int(w.type.shape[0]), "f32"))
    scale = b.rsqrt(b.add(mean, b.constant(n.attrs["eps"], "f32")))
    normed: Value = b.mul(b.mul(x, scale), w)
    g.replace_node(n, normed if dtype == "f32" else b.cast(normed, dtype=dtype))


@dataclass(frozen=True)
class Shard(Pass):
    """Divide the graphs over ranks, which are the values of the symbol K (tensor parallelism).

    Attention and the KV pools are divided by heads; if there are fewer KV heads than ranks, ranks share them. Pools of
    latents are whole on every rank. Recurrences and their states are divided by heads, convolutions by channels.

    Products before attention, and the first products of an MLP or of experts, are divided by columns. The products
    after them are divided by rows, followed by an all_reduce. The output projection is divided by columns, followed by
    an all_gather; embeddings by rows, followed by an all_reduce. Norms, routers and small tables are whole on every
    rank.

    The parts of a weight are slices that begin at a multiple of K. Columns, and rows of tables, that do not divide are
    padded with zeros. The pass runs after page-attention and before fuse-linear; `--explain` names what stays whole.

    ranks: number of ranks.
    group: columns to which `quantize` will give one scale; 0 or 1 if there are none. Every part of an MLP or an expert
      gets a multiple of it if the whole has one.
    """

    name: ClassVar[str] = "shard"
    ranks: int = 1
    group: int = 0

    def run(self, m: Module, ctx: Ctx) -> int:
        """Divide every launched graph; return the number of changes."""
        if self.ranks < 1:
            raise Diagnostic("E421", f"pass shard: ranks={self.ranks} is not a number of ranks", "use 1 or more")
        if self.ranks == 1 or not ctx.spend():
            return 0
        if RANK in m.symbols:
            raise Diagnostic("E437", f"the module is sharded already: it has a symbol {RANK}", "run shard only once")
        m.symbols[RANK] = (0, self.ranks - 1)
        graphs = m.launched
        done = sum(separate(g, ctx) + prepare(g, self.ranks, ctx) for g in graphs)
        for g, plan in make_plans(graphs, self.ranks, ctx, max(1, self.group)):
            done += _Sharding(g, plan, self.ranks, ctx).apply()
        if not done:
            del m.symbols[RANK]
        return done


def with_ranks(passes: Sequence[Pass], ranks: int, target: Target) -> list[Pass]:
    """Return the passes with `shard` after page-attention if there are several ranks.

    On GPUs, `fuse-reduce` follows it, and `fuse-reduce-norm` precedes the passes that fuse norms into products, unless
    the target is deterministic: the final norm follows a sum in the graphs of decoding only. With NCCL, `gather-first`
    takes the place of both.

    Raises Diagnostic E421 if the passes lack page-attention, and E439 if they have `shard` already, or if ranks on the
    target are not supported.
    """
    if any(isinstance(p, Shard) for p in passes):
        remedy = "leave it out of --pipeline and use --tensor-parallel-size; llmc opt runs it"
        raise Diagnostic("E439", "the pipeline has the pass shard", remedy)
    if ranks == 1:
        return list(passes)
    if target.family not in ("cpu", "cuda"):
        cause = f"tensor_parallel_size = {ranks} for {target.name}: ranks on AMD GPUs are not supported"
        raise Diagnostic("E439", cause, "compile for a CPU or an NVIDIA GPU, or without --tensor-parallel-size")
    require(passes, "page-attention", "--tensor-parallel-size")
    at = next(i for i, p in enumerate(passes) if p.name == "page-attention")
    group = next((p.columns for p in passes if isinstance(p, Quantize)), 0)
    front = [*passes[: at + 1], Shard(ranks=ranks, group=group)]
    back = list(passes[at + 1 :])
    if NCCL in target.languages:
        front.append(GatherFirst())
    elif target.family == "cuda":
        front.append(FuseReduce())
        if not target.deterministic:
            end = next((i for i, p in enumerate(back) if p.name in BEHIND_SUMS), len(back))
            back.insert(end, FuseReduceNorm())
    return front + back


class _Sharding:
    """Replaces the nodes of a plan by nodes over parts."""

    def __init__(self, g: Graph, plan: Plan, ranks: int, ctx: Ctx):
        """`plan`: the plan of `g`."""
        self.g, self.plan, self.ranks, self.ops = g, plan, ranks, ctx.opset
        self.parts: dict[Value, Value] = {}  # split value -> a rank's part of it
        self.sliced: dict[tuple[Value, Split, bool], Value] = {}
        self.whole: dict[Value, Value] = {}  # gathered values

    def apply(self) -> int:
        """Apply the plan; return the number of nodes that it changes."""
        for v, s in self.plan.splits.items():
            if v.node is None:
                v.type = v.type.with_shape(*_local_shape(v.type.shape, s))
                self.parts[v] = v
        for n in list(self.g.nodes):
            b = Builder(self.g, self.ops, before=n, loc=n.loc)
            if n in self.plan.relations:
                try:
                    self._divide(b, n, self.plan.relations[n])
                except Mismatch as e:
                    remedy = "use fewer ranks, or smaller groups of quantised weights"
                    raise Diagnostic("E438", f"a weight cannot be divided: {e}", remedy, node=n) from None
            elif any(v in self.plan.splits for v in n.operands):
                self.g.set_operands(n, [self._gathered(b, v) for v in n.operands])
        end = Builder(self.g, self.ops)
        self.g.outputs = [v if v.node is None else self._output(end, v) for v in self.g.outputs]
        for n in reversed(list(self.g.nodes)):
            if n in self.plan.relations:
                self.g.erase(n)
        return len(self.plan.relations)

    def _output(self, b: Builder, v: Value) -> Value:
        return self.parts[v] if v.type.state and v in self.parts else self._gathered(b, v)

    def _divide(self, b: Builder, n: Node, r: Relation) -> None:
        """Add the node that computes a rank's part."""
        operands = []
        for i, (v, s) in enumerate(zip(n.operands, r.operands, strict=True)):
            x = self._gathered(b, v) if s is None else self._part(b, v, s, i in r.halves)
            if i == r.bias:
                x = b.mul(x, b.constant(1 / self.ranks, x.type.dtype))
            operands.append(x)
        op, attrs = n.op, dict[str, Any](n.attrs)
        if r.partial and op.name == "take":
            op = self.ops["take_part"]
            attrs = {"start": n.operands[0].type.shape[0].ceildiv(self.ranks) * D(RANK)}
        if n.op.name in SHAPED and r.results[0] is not None:
            attrs["shape"] = _local_shape(n.result.type.shape, r.results[0])
        names = [v.name for v in n.results] if not r.partial else []
        new = self.g.add(op, operands, attrs, n, n.loc, names)
        if not r.partial:
            self.parts |= dict(zip(n.results, new.results, strict=True))
            return
        total: Value = b.all_reduce(new.result, ranks=self.ranks)
        total.name = n.result.name
        self.g.replace(n.result, total)

    def _gathered(self, b: Builder, v: Value) -> Value:
        """Return the whole of a value."""
        if v not in self.parts:
            return v
        if v not in self.whole:
            split = self.plan.splits[v]
            axis, size = split.axis, v.type.shape[split.axis]
            whole: Value = b.all_gather(self.parts[v], axis=axis, ranks=self.ranks)
            self.whole[v] = whole if split.divides(size) else b.slice(whole, axis=axis, start=D(0), stop=size)
        return self.whole[v]

    def _part(self, b: Builder, v: Value, s: Split, halves: bool) -> Value:
        """Return a rank's part of a value, of both halves of it if `halves`."""
        if self.plan.splits.get(v) == s:
            return self.parts[v]
        key = (v, s, halves)
        if key not in self.sliced:
            x, size = self._gathered(b, v), v.type.shape[s.axis]
            if halves:
                half = size.ceildiv(2)
                two = [self._slice(b, x, s, half, at) for at in (D(0), half)]
                self.sliced[key] = b.concat(*two, axis=s.axis)
            else:
                self.sliced[key] = self._slice(b, x, s, size, D(0))
        return self.sliced[key]

    def _slice(self, b: Builder, x: Value, s: Split, size: Dim, offset: Dim) -> Value:
        """Return a rank's part of `size` elements from `offset` along an axis, and zeros if they do not divide."""
        width = s.local(size)
        if not s.divides(size):
            x = self._padded(b, x, s.axis, offset, size, width * s.parts - size)
            offset = D(0)
        part = D(RANK) if s.parts == self.ranks else (D(RANK) + 1).ceildiv(self.ranks // s.parts) - 1
        start = offset + width * part
        x = cuttable(b, x, s.axis, (start, start + width))
        return b.slice(x, axis=s.axis, start=start, stop=start + width)

    def _padded(self, b: Builder, x: Value, axis: int, offset: Dim, size: Dim, zeros: Dim) -> Value:
        """Return `size` elements from `offset` along an axis, and zeros after them."""
        if size != x.type.shape[axis]:
            x = b.slice(x, axis=axis, start=offset, stop=offset + size)
        shape = (*x.type.shape[:axis], zeros, *x.type.shape[axis + 1 :])
        return b.concat(x, b.broadcast(b.constant(0.0, x.type.dtype), shape=shape), axis=axis)


def _local_shape(shape: tuple[Dim, ...], s: Split) -> tuple[Dim, ...]:
    return (*shape[: s.axis], s.local(shape[s.axis]), *shape[s.axis + 1 :])
