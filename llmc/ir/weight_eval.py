"""Evaluates the weights graph in row blocks: any rows of any value, without computing the rest.

Values are kept in "storage" form, viewed as unsigned words, so that ops that move data move bytes. Ops that compute see
float32 (float64 for f64), rounded to the result's dtype as in the reference interpreter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from math import gcd
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from llmc.diagnostics import Diagnostic
from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Graph, Node, Value
from llmc.ir.interp import run_node
from llmc.ir.ops.packed_codes import BLOCK
from llmc.ir.scalar import parse_expr, reduces_rows

# Values of at most this size in bytes may be kept whole.
SMALL = 64 << 20
# Elements of a weight from which scales are computed at a time.
CHUNK = 4 << 20
# Bytes of whole values kept for later rows. The oldest are dropped first; the newest is always kept.
KEEP = 64 << 20
_WORDS: Mapping[int, np.dtype] = MappingProxyType({b: np.dtype(f"u{b}") for b in (1, 2, 4, 8)})


class WeightSource(Protocol):
    """A source of weights by name."""

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return rows of a tensor in its dtype (bf16 as ml_dtypes.bfloat16), possibly as a view of a mapped file."""


def words(dtype: str) -> np.dtype:
    """Return the unsigned dtype that stores one element; raises Diagnostic E124 for codes below one byte."""
    bits = DTYPES[dtype].bits
    if bits % 8:
        raise Diagnostic("E124", f"weights of dtype {dtype} cannot be evaluated yet", "use a format with byte codes")
    return _WORDS[bits // 8]


def widen(x: np.ndarray, dtype: str) -> np.ndarray:
    """Convert storage to the form that op references take; floats below 32 bits become float32."""
    native = x.view(DTYPES[dtype].np)
    return native.astype(np.float32) if DTYPES[dtype].kind == "f" and DTYPES[dtype].bits < 32 else native


def narrow(x: Any, dtype: str) -> np.ndarray:
    """Convert an array to storage, rounding to nearest even."""
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        return np.asarray(x, dtype=DTYPES[dtype].np, order="C").view(words(dtype))


def shape_of(v: Value) -> tuple[int, ...]:
    """Return the shape as integers; raises Diagnostic E124 if it has symbols."""
    sizes = [d.const for d in v.type.shape]
    if None in sizes:
        raise Diagnostic("E124", f"weight %{v.name} has the symbolic type {v.type}", "weights need constant sizes")
    return tuple(s for s in sizes if s is not None)


class Blocks:
    """Rows of the values of a weights graph. Thread-safe.

    Values that readers need as a whole are computed once and cached until `forget`.
    """

    def __init__(self, graph: Graph, source: WeightSource) -> None:
        """Evaluate `graph`, whose inputs are read from `source`."""
        self.graph = graph
        self.source = source
        self._whole: dict[Value, np.ndarray] = {}
        self._locks: dict[Value, threading.Lock] = {}
        self._guard = threading.Lock()

    def rows(self, v: Value, lo: int, hi: int) -> np.ndarray:
        """Return rows [lo, hi) of axis 0 in storage form; Diagnostic E124 if the source contradicts the graph."""
        if v.node is None:
            return self._read(v, slice(lo, hi))
        rule = _rule_of(v.node, v)
        return rule(self, v, lo, hi) if rule else self.whole(v)[lo:hi]

    def whole(self, v: Value) -> np.ndarray:
        """Return the whole value in storage form, computing it on the first call."""
        with self._guard:
            lock = self._locks.setdefault(v, threading.Lock())
        with lock:
            array = self._whole.get(v)
            if array is None:
                array = self._compute(v)
                self._keep(v, array)
            return array

    def _keep(self, v: Value, x: np.ndarray) -> None:
        """Cache a whole value, and drop the oldest ones while the total exceeds KEEP. The newest is always kept."""
        with self._guard:
            self._whole[v] = x
            total = sum(y.nbytes for y in self._whole.values())
            for old in list(self._whole)[:-1]:
                if total <= KEEP:
                    break
                total -= self._whole.pop(old).nbytes
                self._locks.pop(old, None)

    def forget(self) -> None:
        """Drop the cached values."""
        with self._guard:
            self._whole.clear()
            self._locks.clear()

    def caches_large_value(self, v: Value) -> bool:
        """Whether evaluating `v` keeps a whole value larger than `SMALL`."""
        seen: set[Value] = set()
        todo = [v]
        while todo:
            u = todo.pop()
            if u in seen or u.node is None:
                continue
            seen.add(u)
            todo += u.node.operands
            turns = u.node.op.name == "transpose" and u.node.attrs["perm"][0] != 0
            by_rows = _rule_of(u.node, u) and not turns
            if not by_rows and any((o.type.nbytes.const or 0) > SMALL for o in [*u.node.operands, u]):
                return True
        return False

    def _compute(self, v: Value) -> np.ndarray:
        """Evaluate a whole value, by its row rule if it has one, otherwise with the op's reference."""
        node = v.node
        if node is None:
            return self._read(v, slice(0, shape_of(v)[0]) if v.type.rank else slice(None))
        if rule := _rule_of(node, v):
            return rule(self, v, 0, shape_of(v)[0])
        operands = [widen(self.whole(o), o.type.dtype) for o in node.operands]
        result = run_node(node, operands, {})[node.results.index(v)]
        return narrow(result, v.type.dtype)

    def _read(self, v: Value, rows: slice) -> np.ndarray:
        """Return rows of an input in storage form; `rows` is slice(None) for a scalar."""
        shape = (rows.stop - rows.start, *shape_of(v)[1:]) if v.type.rank else ()
        x, want = self.source.read(v.name, rows), DTYPES[v.type.dtype].np
        if x.shape != shape or x.dtype != want:
            cause = f"weight %{v.name} reads as {x.dtype}{list(x.shape)}, the graph declares {want}{list(shape)}"
            raise Diagnostic("E124", cause, "check that the checkpoint belongs to this config.json")
        return x.view(words(v.type.dtype))


def _rule_of(node: Node, v: Value) -> Rule | None:
    """Return the rule that computes rows of a node's result; None if they need the whole operands."""
    if not v.type.rank:
        return None
    return _RULES.get(node.op.name) or (_pointwise if node.op.scalar is not None and _by_rows(node) else None)


def _by_rows(node: Node) -> bool:
    """Whether rows of the result depend only on the same rows of the operands: no row reduction runs along axis 0."""
    if node.op.name == "fused":
        bodies = [parse_expr(b) for b in node.attrs["body"]]
    elif node.op.scalar is not None:
        bodies = [node.op.scalar(node.attrs)]
    else:
        return True
    return not (any(map(reduces_rows, bodies)) and max((v.type.rank for v in node.operands), default=0) < 2)


def _aligned(blocks: Blocks, o: Value, rank: int, lo: int, hi: int) -> np.ndarray:
    """Rows of an operand that broadcasts to a result of this rank."""
    if o.type.rank < rank or rank == 0:
        return blocks.whole(o)
    return blocks.rows(o, 0, 1) if o.type.shape[0] == 1 else blocks.rows(o, lo, hi)


def _pointwise(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    node = v.node
    assert node is not None
    rank = max(o.type.rank for o in node.operands)
    operands = [widen(_aligned(blocks, o, rank, lo, hi), o.type.dtype) for o in node.operands]
    out = node.op.ref(*operands, **node.attrs)
    part = out[node.results.index(v)] if isinstance(out, tuple) else out
    return narrow(np.broadcast_to(part, (min(hi, shape_of(v)[0]) - lo, *shape_of(v)[1:])), v.type.dtype)


def _cast(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    (x,) = _operands(v)
    same = x.type.dtype == v.type.dtype
    return blocks.rows(x, lo, hi) if same else _pointwise(blocks, v, lo, hi)


def _slice(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    (x,), a = _operands(v), _attrs(v)
    start, step, axis = a["start"].const, a["step"], a["axis"] % v.type.rank
    if axis == 0:
        return blocks.rows(x, start + lo * step, start + (hi - 1) * step + 1)[::step] if hi > lo else _none(v)
    index = [slice(None)] * v.type.rank
    index[axis] = slice(start, a["stop"].const, step)
    return blocks.rows(x, lo, hi)[tuple(index)]


def _concat(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    xs, axis = _operands(v), _attrs(v)["axis"] % v.type.rank
    if axis:
        return np.concatenate([blocks.rows(x, lo, hi) for x in xs], axis)
    pieces, at = [], 0
    for x in xs:
        n = shape_of(x)[0]
        a, b = max(lo - at, 0), min(hi - at, n)
        if a < b:
            pieces.append(blocks.rows(x, a, b))
        at += n
    if not pieces:
        return _none(v)
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def _reshape(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    """Rows of the result are a contiguous range of elements: read the rows of x that contain it."""
    (x,) = _operands(v)
    out = (hi - lo, *shape_of(v)[1:])
    width = int(np.prod(out[1:], dtype=np.int64))
    if x.type.rank == 0 or not width or hi <= lo:
        return blocks.whole(x).reshape(shape_of(v))[lo:hi]
    inner = int(np.prod(shape_of(x)[1:], dtype=np.int64))
    begin, end = lo * width, hi * width
    first, last = begin // inner, -(-end // inner)
    flat = blocks.rows(x, first, last).reshape(-1)
    return flat[begin - first * inner : end - first * inner].reshape(out)


def _transpose(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    (x,), perm = _operands(v), _attrs(v)["perm"]
    if perm[0] == 0:
        return blocks.rows(x, lo, hi).transpose(perm)
    index = [slice(None)] * v.type.rank
    index[perm[0]] = slice(lo, hi)
    return blocks.whole(x)[tuple(index)].transpose(perm)


def _broadcast(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    (x,) = _operands(v)
    return np.broadcast_to(_aligned(blocks, x, v.type.rank, lo, hi), (hi - lo, *shape_of(v)[1:]))


def _pack_panel(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    """Panel p holds rows [p * s, (p + 1) * s) of each part."""
    (w,), a = _operands(v), _attrs(v)
    node = v.node
    assert node is not None
    parts, step = a["parts"], a["rows"] // a["parts"]
    n = shape_of(w)[0] // parts
    first, last = lo * step, min(hi * step, n)
    pieces = [blocks.rows(w, b * n + first, b * n + last) for b in range(parts)]
    return node.op.ref(np.concatenate(pieces) if parts > 1 else pieces[0], **a)


def _apply(v: Value, *operands: np.ndarray, **changed: Any) -> np.ndarray:
    """Return the op's reference on rows of its operands in storage form, with some attributes changed."""
    assert v.node is not None
    wide = [widen(x, o.type.dtype) for x, o in zip(operands, v.node.operands, strict=True)]
    return narrow(v.node.op.ref(*wide, **{**v.node.attrs, **changed}), v.type.dtype)


def _rowwise(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    """Rows of the result depend only on the same rows of the operand."""
    return _apply(v, blocks.rows(_operands(v)[0], lo, hi))


def _pack_fragments(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    """Rows of bytes depend on the codes of their blocks of rows, which are within one matrix of a stack."""
    (code,) = _operands(v)
    if v.type.rank > 2:
        return _rowwise(blocks, v, lo, hi)
    begin = lo - lo % BLOCK
    end = min(-(-hi // BLOCK) * BLOCK, shape_of(code)[0])
    return _apply(v, blocks.rows(code, begin, end))[lo - begin : hi - begin]


def _bitcast(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    return blocks.rows(_operands(v)[0], lo, hi)


def _fnuz_codes(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    """Return the op's reference for each of the 256 codes, taken by the bytes of the operand."""
    (x,) = _operands(v)
    return _apply(v, np.arange(256, dtype=np.uint8))[blocks.rows(x, lo, hi)]


def _unpack_bits(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    """Rows that are packed into words along axis 0 are read from the first value that begins a word."""
    (x,), a = _operands(v), _attrs(v)
    if a["axis"] % v.type.rank:
        return _apply(v, blocks.rows(x, lo, hi))
    width, bits = DTYPES[x.type.dtype].bits, a["bits"]
    begin = lo - lo % (width // gcd(width, bits))
    words = blocks.rows(x, begin * bits // width, -(-hi * bits // width))
    return _apply(v, words, size=hi - begin)[lo - begin :]


def _take_columns(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    x, idx = _operands(v)
    return _apply(v, blocks.rows(x, lo, hi), blocks.whole(idx))


def _take(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    x, idx = _operands(v)
    return _apply(v, blocks.whole(x), blocks.rows(idx, lo, hi))


def _quantize_scale(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    """Row r of the scales is that of the block of rows [r * size, (r + 1) * size), computed a few blocks at a time.

    Leading axes are axes of whole matrices, which are computed one by one.
    """
    (w,), size = _operands(v), _attrs(v)["block"][0]
    if v.type.rank > 2:
        matrices = [_apply(v, blocks.rows(w, i, i + 1)) for i in range(lo, hi)]
        return np.concatenate(matrices) if matrices else _none(v)
    n, k = shape_of(w)
    if not size:
        return _apply(v, blocks.rows(w, 0, n))
    step = max(1, CHUNK // (size * k))
    starts = range(lo, hi, step)
    parts = [_apply(v, blocks.rows(w, a * size, min(min(a + step, hi) * size, n))) for a in starts]
    return np.concatenate(parts) if parts else _none(v)


def _in_blocks(blocks: Blocks, v: Value, lo: int, hi: int) -> np.ndarray:
    """Rows from the first of the block that holds row `lo`; leading axes are axes of whole matrices."""
    code, *rest = _operands(v)
    if v.type.rank > 2:
        return _apply(v, *(blocks.rows(x, lo, hi) for x in (code, *rest)))
    size = _attrs(v)["block"][0]
    begin = lo - lo % size if size else lo
    scales = (lo // size, -(-hi // size)) if size else (0, 1)
    return _apply(v, blocks.rows(code, begin, hi), *(blocks.rows(x, *scales) for x in rest))[lo - begin :]


def _none(v: Value) -> np.ndarray:
    return np.zeros((0, *shape_of(v)[1:]), words(v.type.dtype))


def _operands(v: Value) -> list[Value]:
    assert v.node is not None
    return v.node.operands


def _attrs(v: Value) -> Mapping[str, Any]:
    assert v.node is not None
    return v.node.attrs


Rule = Callable[[Blocks, Value, int, int], np.ndarray]
_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "slice": _slice,
        "concat": _concat,
        "reshape": _reshape,
        "transpose": _transpose,
        "broadcast": _broadcast,
        "cast": _cast,
        "pack_panel": _pack_panel,
        "pack_codes": _rowwise,
        "pack_nibbles": _rowwise,
        "pack_fragments": _pack_fragments,
        "bitcast": _bitcast,
        "fnuz_codes": _fnuz_codes,
        "unpack_bits": _unpack_bits,
        "take": _take,
        "take_columns": _take_columns,
        "dequantize": _in_blocks,
        "quantize_code": _in_blocks,
        "quantize_scale": _quantize_scale,
    }
)
