"""Turns a prompt graph into a serving step: paged attention, device rows as inputs, and sampling at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from llmc_runtime.format.names import CLS, MEAN, POOLING_KINDS
from llmc_runtime.format.pooling import POOLED
from llmc_runtime.format.program import DRAFT_LOGPROB, DRAFT_PREFIX
from llmc_runtime.format.row_abi import BIASES, DRAFT_WIDTH, MAX_DRAFTS, STOPS, TOP_LOGPROBS

from llmc.diagnostics import Diagnostic
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Builder, Graph, Module, Node, Value
from llmc.ir.opdef import OpDef
from llmc.ir.ops.attention import SHARED_ATTRIBUTES
from llmc.ir.ops.recurrent import PROMPT_OPS
from llmc.ir.types import Type, state, tensor
from llmc.passes.base import Ctx, Pass
from llmc.passes.lower.page_recurrence import RecurrentRows

PAGES_MAX = 1 << 30
_CAUSAL = "use a causal model, in which a token attends only to itself and to earlier tokens"
F8, FNUZ = "f8e4m3", "f8e4m3fnuz"
POOLS = ("f32", "bf16", "f16", F8, FNUZ)
DRAFT = "draft"  # the graph of a draft model
KV_SCALES = "kv_scales."  # and the layer: the name of the scales of its pool
RESULTS = ("ids", "logprob", "rank", "top_ids", "top_logprobs")
HIDDEN = "hidden"  # input of the graph of a head: the hidden state of the position before each token
HIDDEN_POOL = f"{DRAFT_PREFIX}kv.{HIDDEN}"  # pages of hidden states, one per token
LATENT, ALIBI = "latent_attention", "alibi_attention"
ATTENTION = ("attention", ALIBI, LATENT)
MAX_VERIFIED = 512  # verified tokens beyond this number cost as much as those of a prompt, so that drafts do not pay


@dataclass(frozen=True)
class PageAttention(Pass):
    """Turn @main(tokens, positions, last) -> logits into a step over device rows.

    Token ids and positions come from row states, attention appends to a paged KV pool and reads it, recurrent ops keep
    their state per device row, and the step returns a sampled id per row. The pool of latent_attention has one key per
    token, part of which is the value.

    If there is a graph @draft, it becomes that of a draft model. If @draft has an input `hidden`, it is a head
    (EAGLE-3, arXiv 2503.01840): @main then returns a hidden state per token after the logits, which the step stores in
    a pool of pages, with the head's keys and values of the same tokens.

    rows: number of device rows.
    max_len: maximum tokens per sequence.
    page: tokens per page.
    tokens: maximum tokens per step; 0 for the upper bound of T.
    kv: dtype of the pools; empty for the dtype of the keys. Pools of f8e4m3 have a weight kv_scales.LAYER: the scales
      of the heads of keys, then of values. In f8e4m3fnuz, the same bits are half the number, so these scales are
      doubled.
    speculate: maximum drafted tokens per row that a step verifies; 0 for none. A step then has up to rows * (1 +
      speculate) entries, but not more than tokens, nor more than 512.
    draft_logprobs: whether @draft also returns the natural log-probability of each token that it drafts, f32[R], among
      the tokens that the row allows.
    pool: "last", "cls" or "mean" if @main is the graph of a model that pools, and the step returns the output `pooled`,
      f32[R, width], instead of ids; empty if the step samples.
    """

    name: ClassVar[str] = "page-attention"
    rows: int = 16
    max_len: int = 2048
    page: int = 16
    tokens: int = 0
    kv: str = ""
    speculate: int = 0
    draft_logprobs: bool = False
    pool: str = ""

    def run(self, m: Module, ctx: Ctx) -> int:
        """Apply the pass to every graph; return the number of changes."""
        graphs = list(m.graphs.values())
        draft = m.graphs.get(DRAFT)
        head = draft.copy() if draft is not None and _takes_hidden(draft) else None
        return sum(self._graph(m, g, ctx, head) for g in graphs)

    def _graph(self, m: Module, g: Graph, ctx: Ctx, head: Graph | None) -> int:
        """Turn one graph into a step; return the number of changes, 0 if it is not a prompt graph."""
        inputs = {v.name: v for v in g.inputs}
        self._check_options()
        if not {"tokens", "positions", "last"} <= inputs.keys() or not ctx.spend():
            return 0
        _check(g, 1 if head is None else 2, bool(self.pool))
        drafts = g.name == DRAFT
        m.symbols["T"] = (1, self.tokens or m.symbols.get("T", (1, self.max_len))[1])
        entries = min(self.rows * (1 + self.speculate), m.symbols["T"][1], MAX_VERIFIED)
        m.symbols["R"] = (1, max(self.rows, entries))
        m.symbols["P"] = (1, PAGES_MAX)
        rows = _Rows(g, self, ctx.opset, drafts)
        for name, value in rows.replacement.items():
            g.replace(inputs[name], value)
            g.inputs.remove(inputs[name])
        pools = [rows.attention(n) for n in list(g.nodes) if n.op.name in ATTENTION]
        pools += rows.recurrences()
        if head is not None:
            pools += [rows.keep_hidden()] if drafts else rows.hand_over(head)
        if drafts:
            rows.draft(pools)
        elif self.pool:
            rows.pool(pools)
        else:
            rows.sample(pools)
        return 1 + len(pools)

    def _check_options(self) -> None:
        """Raise Diagnostic E421 for an option out of range."""
        if self.kv and self.kv not in POOLS:
            cause = f"pass page-attention: kv={self.kv} is not a dtype of KV pools"
            raise Diagnostic("E421", cause, f"use one of {', '.join(POOLS)}")
        if not 0 <= self.speculate <= MAX_DRAFTS:
            cause = f"pass page-attention: speculate={self.speculate} is not a number of drafted tokens"
            raise Diagnostic("E421", cause, f"use 0 to {MAX_DRAFTS}")
        if self.pool and self.pool not in POOLING_KINDS:
            raise Diagnostic(
                "E421", f"pass page-attention: pool={self.pool} is not known", f"use {', '.join(POOLING_KINDS)}"
            )


def _takes_hidden(g: Graph) -> bool:
    return any(v.name == HIDDEN for v in g.inputs)


def _check(g: Graph, outputs: int, pools: bool) -> None:
    """Raise Diagnostic E435 unless attention is causal, layer numbers are unique, and there are `outputs` outputs.

    A model that pools may attend to later tokens: its prompts run in a single step.
    """
    layers: set[int] = set()
    for n in g.nodes:
        if n.op.name in PROMPT_OPS and g.name == DRAFT:
            cause = "the draft model has recurrent layers, whose state cannot be taken back when drafts are rejected"
            remedy = "use a draft model without recurrent layers, or prompt lookup (compile with --speculate K)"
            raise Diagnostic("E435", cause, remedy, node=n)
        if n.op.name not in ATTENTION:
            continue
        if not (n.attrs.get("causal", True) or pools):
            raise Diagnostic("E435", "attention to later tokens cannot be served token by token", _CAUSAL, node=n)
        if n.attrs["layer"] in layers:
            raise Diagnostic(
                "E435", f"two attention nodes have the attribute layer={n.attrs['layer']}", "number them from 0", node=n
            )
        layers.add(n.attrs["layer"])
    if len(g.outputs) != outputs:
        expected = "only the logits" if outputs == 1 else "the logits and a hidden state per token"
        raise Diagnostic("E435", f"@{g.name} has {len(g.outputs)} outputs, expected {expected}", f"return {expected}")


class _Rows:
    """The row states of one graph, and the values that every step derives from them."""

    def __init__(self, g: Graph, options: PageAttention, ops: Mapping[str, OpDef], drafts: bool):
        """`drafts`: the graph is that of a draft model, which has its own KV pools, and a place in every row.

        A head's entry for a token, its keys, values and hidden state, is at the position before that token.
        """
        self.g, self.options, self.ops, self.prefix = g, options, ops, DRAFT_PREFIX if drafts else ""
        head = _takes_hidden(g)
        prompt_inputs = list(g.inputs)
        g.inputs.clear()  # the inputs of a step come first
        self.rows = g.input("rows", tensor("i32", "R"))
        self.qlens = g.input("qlens", tensor("i32", "R"))
        if not options.pool:
            self.emit = g.input("emit", tensor("i32", "R"))
        n, length = options.rows, options.max_len
        self.tokens = g.input("row.tokens", state("i32", n, length))
        self.length = g.input("row.length", state("i32", n))
        self.pages = g.input("row.pages", state("i32", n, D(length).ceildiv(options.page)))
        if not options.pool:
            self._sampling(g.outputs[0].type.shape[-1], drafts)
        first_position = self.length  # the position of each row's first new token
        if drafts:
            first_position = self.reach = g.input("row.reach", state("i32", n))
        elif options.speculate:
            self.drafts = g.input("row.drafts", state("i32", n, DRAFT_WIDTH))
        g.inputs += prompt_inputs
        b = Builder(g, ops, before=g.nodes.head)
        self.starts, self.token_row, self.positions = b.row_spans(self.rows, self.qlens, first_position, tokens=D("T"))
        self.slots = b.row_slots(self.pages, self.token_row, self.positions, page=options.page)
        self.ids = b.row_ids(self.tokens, self.token_row, self.positions)
        last = b.row_first(self.starts) if options.pool == CLS else b.row_last(self.starts)
        self.replacement = {"tokens": self.ids, "positions": self.positions, "last": last}
        if head:
            (hidden,) = (v for v in prompt_inputs if v.name == HIDDEN)
            self.hidden = self._hidden_pool(hidden.type)
            before, slots = self._before(b)
            self.replacement |= {"positions": before, HIDDEN: b.page_take(self.hidden, slots)}
            self.append_at, self.attend_at = slots, before
        else:
            self.append_at, self.attend_at = self.slots, self.positions
        bidirectional = any(n.op.name == "attention" and not n.attrs["causal"] for n in g.nodes)
        self.reaches = b.row_reach(self.starts, self.positions) if bidirectional else self.attend_at

    def _before(self, b: Builder) -> tuple[Value, Value]:
        """Return the positions before those of the tokens, and their slots."""
        before: Value = b.add(self.positions, b.constant(-1, "i32"))
        return before, b.row_slots(self.pages, self.token_row, before, page=self.options.page)

    def _hidden_pool(self, hidden: Type) -> Value:
        """Add the pool of hidden states of the type of those of a step, [T, H]."""
        return self.g.input(HIDDEN_POOL, Type(hidden.dtype, (D("P"), D(self.options.page), hidden.shape[1]), True))

    def recurrences(self) -> list[Value]:
        """Replace the recurrent nodes; return the new versions of their states."""
        step, options = (self.rows, self.starts, self.positions), self.options
        recurrent = RecurrentRows(self.g, self.ops, step, options.rows, options.speculate)
        return [s for n in list(self.g.nodes) if n.op.name in PROMPT_OPS for s in recurrent.replace(n)]

    def keep_hidden(self) -> Value:
        """Store a head's own hidden states at its tokens, where its next step reads them; return the pool."""
        hidden = self.g.outputs.pop()
        b = Builder(self.g, self.ops, loc="head")
        return b.page_put(self.hidden, hidden, self.slots)

    def hand_over(self, head: Graph) -> list[Value]:
        """Store the hidden states of the step's tokens, and a head's keys and values; return the two pools.

        The head's keys and values of a token need the hidden state of the position before: one of this step or, for a
        sequence's first token in it, of an earlier one.
        """
        hidden = self.g.outputs.pop()
        b = Builder(self.g, self.ops, loc="head")
        pool = b.page_put(self._hidden_pool(hidden.type), hidden, self.slots)
        before, slots = self._before(b)
        values = {"tokens": self.ids, "positions": before, HIDDEN: b.page_take(pool, slots)}
        (attention,) = (n for n in head.nodes if n.op.name in ATTENTION)
        known = {v: values[v.name] for v in head.inputs if v.name in values}
        b = Builder(self.g, self.ops, loc=attention.loc)
        if attention.op.name == LATENT:
            k = self._copied(attention.operands[2], known)
            return [pool, self._append_latent(b, DRAFT_PREFIX, 0, k, slots)]
        k, v = (self._copied(x, known) for x in attention.operands[1:3])
        return [pool, self._append(b, DRAFT_PREFIX, 0, k, v, slots)]

    def _copied(self, v: Value, known: dict[Value, Value]) -> Value:
        """Copy the nodes that a value of another graph is computed by; `known` has the copies, and the inputs'."""
        if v not in known and v.node is None:
            same = (w for w in self.g.inputs if w.name == v.name)
            known[v] = next(same, None) or self.g.input(v.name, v.type, v.weight)
        if v not in known and v.node is not None:
            operands = [self._copied(x, known) for x in v.node.operands]
            new = self.g.add(v.node.op, operands, v.node.attrs, loc=v.node.loc)
            known |= dict(zip(v.node.results, new.results, strict=True))
        return known[v]

    def _sampling(self, vocab: Dim, drafts: bool) -> None:
        """Add the inputs that sampling reads and updates.

        A row that verifies drafts has a mask for each of its entries. A draft model reads those masks that hold for all
        tokens of a row, from a state of its own.
        """
        g, n = self.g, self.options.rows
        self.fparams = g.input("row.fparams", state("f32", n, 8))
        self.iparams = g.input("row.iparams", state("i32", n, 8))
        self.stops = g.input("row.stops", state("i32", n, STOPS))
        self.seen = g.input("row.seen", state("i32", n, vocab.ceildiv(32)))
        self.counts = g.input("row.counts", state("i32", n, vocab))
        self.bias_ids = g.input("row.bias_ids", state("i32", n, BIASES))
        self.biases = g.input("row.biases", state("f32", n, BIASES))
        name, masks = ("row.draft_allowed", 1) if drafts else ("row.allowed", 1 + self.options.speculate)
        self.allowed = g.input(name, state("i32", n, vocab.ceildiv(32) * masks))

    def attention(self, n: Node) -> Value:
        """Replace one attention node; return the newest version of its layer's pool."""
        if n.op.name == LATENT:
            return self._latent(n)
        q, k, v, _, *last = n.operands  # sinks or slopes
        wide, narrow = int(k.type.shape[2]), int(v.type.shape[2])
        if narrow > wide:
            raise Diagnostic(
                "E435", f"values are wider than keys ({narrow} against {wide})", "pad the keys first", node=n
            )
        b = Builder(self.g, self.ops, before=n, loc=n.loc)
        newest = self._append(b, self.prefix, n.attrs["layer"], k, v, self.append_at)
        attrs = {key: n.attrs[key] for key in SHARED_ATTRIBUTES if key in n.attrs}
        reaches = self.attend_at if n.attrs.get("causal", True) else self.reaches
        step = (self.pages, self.rows, self.starts, reaches)
        assert newest.node is not None
        paged = b.paged_alibi_attention if n.op.name == ALIBI else b.paged_attention
        out = paged(q, newest, *step, *newest.node.operands[4:], *last, **attrs)
        if narrow < wide:
            out = b.slice(out, axis=2, start=0, stop=narrow)
        self.g.replace(n.result, out)
        self.g.erase(n)
        return newest

    def _latent(self, n: Node) -> Value:
        """Replace one latent_attention node; return the newest version of its layer's pool."""
        q, rotary, k, _ = n.operands
        b = Builder(self.g, self.ops, before=n, loc=n.loc)
        newest = self._append_latent(b, self.prefix, n.attrs["layer"], k, self.append_at)
        step = (self.pages, self.rows, self.starts, self.attend_at)
        out: Value = b.paged_latent_attention(q, rotary, newest, *step, scale=n.attrs["scale"])
        self.g.replace(n.result, out)
        self.g.erase(n)
        return newest

    def _append_latent(self, b: Builder, prefix: str, layer: int, k: Value, slots: Value) -> Value:
        """Store keys [T, size], whose first part is the value, in the pool of a layer; return its newest version."""
        dtype = self.options.kv or k.type.dtype
        if dtype in (F8, FNUZ):
            cause = "KV pools of latents cannot hold 8-bit floats"
            raise Diagnostic("E435", cause, "use --kv-cache-dtype bf16, or the pipeline `serve, without absorb-latent`")
        pool = self.g.input(f"{prefix}kv.{layer}", Type(dtype, (D("P"), D(self.options.page), k.type.shape[1]), True))
        return b.page_put(pool, k if k.type.dtype == dtype else b.cast(k, dtype=dtype), slots)

    def _append(self, b: Builder, prefix: str, layer: int, k: Value, v: Value, slots: Value) -> Value:
        """Append keys, and values that are as wide or narrower, to the pool of a layer; return its newest version."""
        wide, heads = k.type.shape[2], k.type.shape[1]
        if v.type.shape[2] != wide:
            v = _pad(b, v, int(wide))
        pool = Type(self.options.kv or k.type.dtype, (D("P"), D(2), heads, D(self.options.page), wide), True)
        kv = self.g.input(f"{prefix}kv.{layer}", pool)
        scales: list[Value] = []
        if pool.dtype in (F8, FNUZ):
            stored = self.g.input(f"{prefix}{KV_SCALES}{layer}", tensor("f32", heads * 2), weight=True)
            scales = [stored if pool.dtype == F8 else b.mul(stored, b.constant(2.0, "f32"))]
        return b.kv_append(kv, k, v, slots, *scales)

    def sample(self, pools: list[Value]) -> None:
        """Replace the logits by the step's outputs: ids and log-probabilities, then the new versions of all states."""
        b, logits = self._logits()
        step = (self.rows, self.starts, self.positions)
        ids, _ = self._ids(b, logits, (self.starts, self.positions, self.tokens) if self.options.speculate else ())
        top = min(TOP_LOGPROBS, int(logits.type.shape[-1]))
        results = [ids, *b.row_logprobs(logits, ids, self.rows, self.iparams, k=top)]
        operands = (self.tokens, self.length, self.counts, *step, self.emit, ids)
        states = b.row_commit(*operands) if not self.options.speculate else self._accept(b, operands, results)
        for v, name in zip(results, (*RESULTS, "proposed"), strict=False):
            v.name = name
        self.g.outputs = [*results, *states, *pools]

    def pool(self, pools: list[Value]) -> None:
        """Replace the output by the pooled values of each row, then the new versions of the states."""
        b = Builder(self.g, self.ops, loc="pool")
        (out,) = self.g.outputs
        if self.options.pool == MEAN:
            out = b.row_mean(out, self.starts)
        out.name = POOLED
        self.g.outputs = [out, b.row_advance(self.length, self.rows, self.starts, self.positions), *pools]

    def draft(self, pools: list[Value]) -> None:
        """Replace the logits by the drafts that are sampled from them, as the model samples at the same position."""
        b, logits = self._logits()
        ids, allowed = self._ids(b, logits, ())
        states = b.row_extend(self.tokens, self.reach, self.rows, self.starts, self.positions, self.emit, ids)
        self.g.outputs = [*states, *pools]
        if self.options.draft_logprobs:
            logprob, *_ = b.row_logprobs(allowed, ids, k=1)
            logprob.name = DRAFT_LOGPROB
            self.g.outputs.insert(0, logprob)

    def _logits(self) -> tuple[Builder, Value]:
        b = Builder(self.g, self.ops, loc="sample")
        (logits,) = self.g.outputs
        if logits.type.rank != 2:
            logits = b.reshape(logits, shape=[D("R"), logits.type.shape[-1]])
        return b, logits

    def _ids(self, b: Builder, logits: Value, drafted: tuple[Value, ...]) -> tuple[Value, Value]:
        """Sample an id per entry; return the ids, and the logits with penalties and masks.

        Penalties count the tokens that were drafted before an entry, if given.
        """
        params, step = (self.fparams, self.iparams), (self.rows, self.starts, self.positions)
        penalties = (self.seen, self.counts, self.bias_ids, self.biases)
        x = b.row_penalize(logits, self.rows, *params, *penalties, *drafted)
        x = b.row_mask(x, *step, self.iparams, self.stops, self.allowed)
        ids: Value = b.row_sample(x, *step, self.tokens, *params)
        return ids, x

    def _accept(self, b: Builder, operands: tuple[Value, ...], results: list[Value]) -> list[Value]:
        """Accept and propose drafts: update the results, and return the new versions of the states."""
        accepted, tokens, length, counts = b.row_accept(*operands, limit=self.options.speculate)
        of_step = (self.rows, self.starts, self.emit)
        proposed, tokens, drafts = b.row_propose(tokens, self.drafts, length, *of_step)
        results[:] = [accepted, *results[1:], proposed]
        return [tokens, length, counts, drafts]


def _pad(b: Builder, v: Value, width: int) -> Value:
    """Append zeros to the last axis, so that values fit a pool with the width of the keys."""
    t, heads, narrow = v.type.shape
    zero = b.broadcast(b.constant(0.0, v.type.dtype), shape=[t, heads, D(width) - narrow])
    return b.concat(v, zero, axis=2)
