"""Plans a sharding: which values each rank holds a part of, derived by following a split axis through the graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llmc.diagnostics import Diagnostic
from llmc.ir import contents
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Node, Value
from llmc.passes.analysis import Origin, origin
from llmc.passes.base import Ctx
from llmc.passes.lower.shard_rules import (
    EXPANDED,
    LATENT,
    RECURRENCES,
    Relation,
    Split,
    experts_of,
    heads_of,
    kv_parts,
    recurrence_of,
    relate,
    splits_of,
)

MIN_TABLE_ROWS = 256  # minimum rows of a table to divide; each lookup in a divided table costs an all_reduce


@dataclass
class Plan:
    """The values of which each rank holds a part, and the relations of the nodes that read or make them.

    gathered: split values that some readers need whole.
    """

    splits: dict[Value, Split] = field(default_factory=dict)
    relations: dict[Node, Relation] = field(default_factory=dict)
    gathered: set[Value] = field(default_factory=set)


def make_plans(graphs: Sequence[Graph], ranks: int, ctx: Ctx, group: int) -> list[tuple[Graph, Plan]]:
    """Return the plan of each graph. A state is split in the same way in all of them.

    group: columns inside an MLP or an expert of which every part gets a multiple, if the whole has one.

    Raises Diagnostic E437 if heads, or quantised columns inside an MLP or an expert, do not divide.
    """
    plans = [make_plan(g, ranks, ctx, {}, group) for g in graphs]
    states = {v.name: s for plan in plans for v, s in plan.splits.items() if v.type.state and v.node is None}
    done = []
    for g, plan in zip(graphs, plans, strict=True):
        split_elsewhere = {v: states[v.name] for v in g.inputs if v.name in states and v not in plan.splits}
        done.append((g, make_plan(g, ranks, ctx, split_elsewhere, group) if split_elsewhere else plan))
    return done


def make_plan(g: Graph, ranks: int, ctx: Ctx, states: Mapping[Value, Split], group: int = 1) -> Plan:
    """Return the plan of one graph.

    Attention and recurrences are split by heads, large tables by rows, and products by columns if a product by rows, or
    the graph's output, follows. `states` are split as another graph, which reads them, does.
    """
    planner = _Planner(g, ranks, ctx, group)
    planner.split_attention()
    planner.split_recurrences()
    planner.split_writers(states)
    planner.split_tables()
    planner.split_products_and_experts()
    return planner.plan


class _Planner:
    """Makes the plan of one graph, op by op: each method adds its nodes and the regions that their splits reach."""

    def __init__(self, g: Graph, ranks: int, ctx: Ctx, group: int) -> None:
        self.g, self.ranks, self.ctx, self.group = g, ranks, ctx, group
        self.plan = Plan()
        known: dict[Value, Origin] = {}
        self.weights = {v for v in g.values if origin(v, known) is not Origin.INPUTS}

    def split_attention(self) -> None:
        """Split attention by heads. Raises Diagnostic E437 if they do not divide."""
        for n in self._nodes(*EXPANDED, *LATENT):
            relation = heads_of(n, self.ranks)
            if relation is None:
                heads = int(n.operands[0].type.shape[1])
                possible = [ranks for ranks in _divisors(heads) if kv_parts(n, ranks) is not None]
                cause = f"{heads} query heads, with their KV heads, do not divide over {self.ranks} ranks"
                raise _error(n, cause, possible)
            self._accept_or_miss(n, self._region(n, relation, gather=True))

    def split_recurrences(self) -> None:
        """Split recurrences by heads. If they do not divide, every rank computes all; a near miss has the reason."""
        for n in self._nodes(*RECURRENCES):
            relation = recurrence_of(n, self.ranks)
            region = self._region(n, relation, gather=True) if relation else "its heads do not divide"
            self._accept_or_miss(n, region)

    def split_writers(self, states: Mapping[Value, Split]) -> None:
        """Split the nodes that write `states`, such as the keys and values of another graph's attention."""
        for v, split in states.items():
            for n in v.uses:
                if n not in self.plan.relations:
                    self._split_writer(n, v, split)

    def _split_writer(self, n: Node, v: Value, split: Split) -> None:
        """Split one node that writes the state `v`. Raises Diagnostic E437 if it cannot be split."""
        relation = relate(n, v, split, self.ranks)
        region = "its op cannot" if relation is None else self._region(n, relation, gather=True)
        if isinstance(region, str):
            cause = f"{n.op.name} cannot write a part of {v.name}, which another graph divides over ranks: {region}"
            raise Diagnostic("E437", cause, "compile without --draft, or without --tensor-parallel-size", node=n)
        self._accept(region)

    def split_tables(self) -> None:
        """Split large tables of floats, such as embeddings, by rows."""
        for n in self._nodes("take"):
            table = n.operands[0]
            if table not in self.weights or n.result in self.weights or table.type.rank != 2:
                continue
            is_large = (table.type.shape[0].const or 0) >= MIN_TABLE_ROWS
            if is_large and table.type.format is None and DTYPES[table.type.dtype].kind == "f":
                self.plan.relations[n] = Relation((Split(0, self.ranks), None), (None,), partial=True)

    def split_products_and_experts(self) -> None:
        """Split products that no region has reached yet, and stacks of experts."""
        for n in self._nodes("linear", "moe"):
            if n.op.name == "moe":
                self._split_experts(n)
            elif n not in self.plan.relations:
                self._split_product(n)

    def _split_product(self, n: Node) -> None:
        """Divide the columns of a product, if the region that follows ends in a sum over ranks or is gathered.

        Otherwise every rank computes all columns; a near miss has the reason. Raises Diagnostic E437 if the region ends
        in a sum, and its quantised columns do not divide.
        """
        last = n.result.type.rank - 1
        size = n.result.type.shape[last].const
        relation = relate(n, n.result, Split(last, self.ranks), self.ranks)
        if size is None or size == 1 or relation is None or n.result in self.weights:
            return
        region = self._region(n, relation, gather=False)
        if isinstance(region, str):
            self.ctx.miss("shard", n, region)
            return
        reduced = any(r.partial for r in region.relations.values())
        unit = self._unit(size, n.operands[1])
        if reduced and unit > 1:
            relation = relate(n, n.result, Split(last, self.ranks, unit), self.ranks)
            in_groups = self._region(n, relation, gather=False) if relation else ""
            region = region if isinstance(in_groups, str) else in_groups
        weight = n.operands[1].type
        even = size % self.ranks == 0
        if weight.format is not None and not (even and (reduced or weight.can_cut(0, size // self.ranks))):
            cause = f"{size} quantised columns do not divide over {self.ranks} ranks"
            if reduced:
                raise _error(n, cause, _divisors(size))
            self.ctx.miss("shard", n, f"{cause}; every rank computes all of them")
        elif reduced or region.gathered:
            self._accept(region)

    def _unit(self, size: int, weight: Value) -> int:
        """Return the unit of the parts of an MLP's columns: whole groups, if the whole has them and parts do not."""
        uneven = size % self.group == 0 and size % (self.group * self.ranks) != 0
        return self.group if uneven and weight.type.format is None else 1

    def _split_experts(self, n: Node) -> None:
        """Divide the columns inside every expert. Raises Diagnostic E437 if quantised ones do not divide."""
        down = n.operand("down")
        assert down is not None
        size = int(down.type.shape[2])
        relation = experts_of(n, self.ranks, self._unit(size, down))
        if relation is None:
            cause = f"{size} quantised columns of an expert do not divide over {self.ranks} ranks"
            raise _error(n, cause, _divisors(size))
        self.plan.relations[n] = relation

    def _nodes(self, *ops: str) -> Iterator[Node]:
        return (n for n in self.g.nodes if n.op.name in ops and self.ctx.allows(n))

    def _region(self, n: Node, relation: Relation, gather: bool) -> Plan | str:
        return grow(self.g, n, relation, self.ranks, self.plan, self.weights, gather)

    def _accept_or_miss(self, n: Node, region: Plan | str) -> None:
        if isinstance(region, str):
            self.ctx.miss("shard", n, region)
        else:
            self._accept(region)

    def _accept(self, region: Plan) -> None:
        self.plan.splits |= region.splits
        self.plan.relations |= region.relations
        self.plan.gathered |= region.gathered


def _error(n: Node, cause: str, possible: list[int]) -> Diagnostic:
    return Diagnostic("E437", cause, f"possible numbers of ranks: {', '.join(map(str, possible))}", node=n)


def _divisors(size: int) -> list[int]:
    return [w for w in range(1, size + 1) if size % w == 0]


def grow(
    g: Graph, n: Node, relation: Relation, ranks: int, plan: Plan, weights: set[Value], gather: bool
) -> Plan | str:
    """Return the plan of all values that a node's relation splits, directly or indirectly; or why there is none.

    An operand whose split cannot reach all of its readers is computed whole instead, and sliced. gather: whether any
    reader of a split result may get it whole; if not, only the graph's outputs and ops on device rows may.
    """
    whole: set[Value] = set(weights)
    while True:
        region = _Region(g, ranks, plan, whole, gather)
        stuck = region.add(n, relation) or region.follow()
        if stuck is None:
            return region.additions
        v, why = stuck
        if v not in region.demanded or v in whole:
            return why
        whole.add(v)


Stuck = tuple[Value, str] | None


class _Region:
    """The growing set of split values around one node."""

    def __init__(self, g: Graph, ranks: int, plan: Plan, whole: set[Value], gather: bool):
        """`whole`: values that stay whole."""
        self.g, self.ranks, self.plan, self.whole, self.gather = g, ranks, plan, whole, gather
        self.additions = Plan()  # what is about to be added to `plan`
        self.demanded: set[Value] = set()  # split because a reader needs a part of it
        self.work: list[Value] = []
        self.outputs = set(g.outputs)

    def add(self, n: Node, r: Relation) -> Stuck:
        """Add a node with its relation; return the value that contradicts it, and why."""
        self.additions.relations[n] = r
        for v, s in splits_of(n, r):
            if s is None:
                if v in self.additions.splits:
                    return v, f"{n.op.name} needs it whole"
                continue
            if v in self.additions.splits:
                if self.additions.splits[v] != s:
                    return v, f"{n.op.name} needs another axis of it"
                continue
            is_operand = all(v is not result for result in n.results)
            if is_operand and not self._can_make(v, s):
                continue
            if is_operand:
                self.demanded.add(v)
            self.additions.splits[v] = s
            self.work.append(v)
        return None

    def _can_make(self, v: Value, s: Split) -> bool:
        """Whether the node that makes an operand can make its part; if not, the operand is sliced."""
        if v in self.whole or v in self.plan.splits:
            return False
        if v.node is None:
            return v.type.state
        if v.node in self.plan.relations:
            return False
        return v.node in self.additions.relations or relate(v.node, v, s, self.ranks) is not None

    def follow(self) -> Stuck:
        """Add the nodes that make or read split values until there are no more."""
        while self.work:
            v = self.work.pop()
            if stuck := self._add_neighbours(v, self.additions.splits[v]):
                return stuck
        return None

    def _add_neighbours(self, v: Value, s: Split) -> Stuck:
        """Add the producer of a split value and its users; a user that cannot be split gathers the value."""
        if stuck := self._add_producer(v, s):
            return stuck
        for reader in dict.fromkeys(v.uses):
            if stuck := self._add_reader(v, s, reader):
                return stuck
        if v in self.outputs and not v.type.state:
            if s.parts != self.ranks:
                return v, "ranks share its parts"
            self.additions.gathered.add(v)
        return None

    def _add_producer(self, v: Value, s: Split) -> Stuck:
        if v.node is None or v.node in self.additions.relations:
            return None
        relation = relate(v.node, v, s, self.ranks)
        return self.add(v.node, relation) if relation else (v, f"{v.node.op.name} cannot make a part of it")

    def _add_reader(self, v: Value, s: Split, reader: Node) -> Stuck:
        """Add a reader of a split value: it reads the part or, if it may, the gathered value."""
        if reader in self.additions.relations:
            reads_part = (v, s) in splits_of(reader, self.additions.relations[reader])
            return None if reads_part else (v, f"{reader.op.name} needs it otherwise")
        relation = None if reader in self.plan.relations else relate(reader, v, s, self.ranks)
        if relation is not None:
            return self.add(reader, relation)
        if not self._may_gather(v, s, reader):
            return v, f"{reader.op.name} cannot read a part of it"
        self.additions.gathered.add(v)
        return None

    def _may_gather(self, v: Value, s: Split, reader: Node) -> bool:
        if s.parts != self.ranks or v.type.state or v in self.demanded:
            return False
        of_rows = any(h is contents.rows for h in reader.op.holds.values())
        return self.gather or of_rows
