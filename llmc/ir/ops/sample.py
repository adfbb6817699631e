"""Sampling inside the graph: penalties, masks, random draw and log-probabilities. A step returns ids, not logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from llmc.ir.opdef import OpDef, op
from llmc.ir.ops.state import ends, row_commit
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) determined by (seed, position): splitmix64 (Steele, Lea, Flood 2014) applied to both."""
    z = _mix(_mix(seed & _MASK64) ^ (position & _MASK64))
    return float(z >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _fparams(rng: Any, rows: int) -> Any:
    f = np.zeros((rows, 8), np.float32)
    f[:, 0] = rng.choice([0.0, 0.5, 1.5], rows)
    f[:, 1] = rng.choice([1.0, 0.8], rows)
    f[:, 2] = rng.choice([0.0, 0.05], rows)
    f[:, 3] = rng.choice([1.0, 1.7], rows)
    f[:, 4], f[:, 5] = rng.uniform(-1, 1, (2, rows))
    return f


def _iparams(rng: Any, rows: int) -> Any:
    i = np.zeros((rows, 8), np.int32)
    i[:, 0] = rng.choice([0, 5], rows)
    i[:, 1], i[:, 2] = rng.integers(-(2**31), 2**31, (2, rows))
    i[:, 3], i[:, 4] = rng.choice([2, 6], rows), rng.integers(2, 12, rows)
    i[:, 6], i[:, 7] = rng.integers(0, 4, rows), rng.integers(0, 2, rows)
    return i


def _states(rng: Any, rows: int, v: int) -> dict[str, Any]:
    """Random row states for `rows` rows and a vocabulary of v ids."""
    i32 = np.int32
    words = (rows, -(-v // 32))
    stops = np.full((rows, 32), -1, i32)
    stops[:, :2] = rng.integers(0, v, (rows, 2))
    return {
        "fparams": _fparams(rng, rows),
        "iparams": _iparams(rng, rows),
        "stops": stops,
        "seen": rng.integers(-(2**31), 2**31, words).astype(i32),
        "counts": rng.integers(0, 3, (rows, v)).astype(i32),
        "bias_ids": np.sort(rng.permuted(np.tile(np.arange(v), (rows, 1)), axis=1)[:, :8], 1).astype(i32),
        "biases": rng.standard_normal((rows, 8)).astype(np.float32) * 4,
        "allowed": rng.integers(-(2**31), 2**31, words).astype(i32),
        "tokens": rng.integers(0, v, (rows, 12)).astype(i32),
    }


def _entries(rng: Any) -> dict[str, Any]:
    """Random operands of a step with three entries over 41 ids: two of three device rows, and padding."""
    i32 = np.int32
    return {
        "logits": rng.standard_normal((3, 41)).astype(np.float32) * 3,
        "rows": np.array([2, 0, -1], i32),
        "starts": np.array([0, 3, 4, 4], i32),
        "positions": np.array([1, 2, 3, 5, -1], i32),
        **_states(rng, 3, 41),
    }


_PENALIZED = ("logits", "rows", "fparams", "iparams", "seen", "counts", "bias_ids", "biases")
_MASKED = ("logits", "rows", "starts", "positions", "iparams", "stops", "allowed")
_SAMPLED = ("logits", "rows", "starts", "positions", "tokens", "fparams", "iparams")
_BLOCKS = (
    "logits", "rows", "starts", "positions", "fparams", "iparams", "stops", "seen", "counts", "bias_ids", "biases",
    "allowed",
)  # fmt: skip


def _example(names: tuple[str, ...]) -> Any:
    def example(rng: Any) -> Any:
        entries = _entries(rng)
        return [entries[name] for name in names], {}

    return example


@op(
    "(logits: f[r, v], rows: i32[r], fparams: state f32[m, 8], iparams: state i32[m, 8], seen: state i32[m, w],"
    " counts: state i32[m, v], bias_ids: state i32[m, b], biases: state f32[m, b]) -> f32[r, v]",
    flops="4*r*v", bytes="r*v*bytes_logits + 8*r*v", example=_example(_PENALIZED),
)  # fmt: skip
def row_penalize(
    logits: Any, rows: Any, fparams: Any, iparams: Any, seen: Any, counts: Any, bias_ids: Any, biases: Any
) -> Any:
    """Apply logit_bias, then the repetition, frequency and presence penalties.

    The biases are the row's first iparams[row, 6] ids, in ascending order. The repetition penalty (Keskar et al. 2019,
    arXiv 1909.05858) covers prompt and output, the others only the output. `seen` is a bitmap of the prompt's ids: bit
    id % 32 of word id // 32.
    """
    out = np.array(logits)
    v = out.shape[1]
    for i, row in enumerate(rows):
        if row < 0:
            continue
        count = iparams[row, 6]
        out[i, bias_ids[row, :count]] += biases[row, :count]
        rep, presence, frequency = fparams[row, 3:6]
        bits, n = _bits(seen[row], v), counts[row]
        x = out[i]
        x = np.where(bits | (n > 0), np.where(x > 0, x / rep, x * rep), x)
        out[i] = x - frequency * n - presence * (n > 0)
    return out


def _bits(words: Any, v: int) -> Any:
    """The first v bits of a bitmap, as bools."""
    return (words[np.arange(v) // 32].view(np.uint32) >> (np.arange(v) % 32).astype(np.uint32)) & 1 != 0


@op(
    "(logits: f32[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], iparams: state i32[m, 8],"
    " stops: state i32[m, s], allowed: state i32[m, w]) -> f32[r, v]", bytes="8*r*v", example=_example(_MASKED),
)  # fmt: skip
def row_mask(logits: Any, rows: Any, starts: Any, positions: Any, iparams: Any, stops: Any, allowed: Any) -> Any:
    """Set logits of forbidden ids to -inf.

    The row's stop ids (-1: none) are forbidden until its length reaches min_len. If iparams[row, 7] is not 0, so are
    all ids that are not in the bitmap `allowed` (bit id % 32 of word id // 32).
    """
    out = np.array(logits)
    for i, (row, end) in enumerate(zip(rows, ends(rows, starts, positions), strict=True)):
        if row >= 0 and end < iparams[row, 4]:
            out[i, stops[row][stops[row] >= 0]] = -np.inf
        if row >= 0 and iparams[row, 7]:
            out[i, ~_bits(allowed[row], out.shape[1])] = -np.inf
    return out


def kept(x: Any, fparams: Any, top_k: int) -> tuple[Any, Any]:
    """Return the probabilities of one row of logits, and a mask of the ids that the filters keep.

    Applied in this order: temperature, min_p, top_k, top_p (Holtzman et al. 2020, arXiv 1904.09751). Among equal
    probabilities, the lower id ranks first.
    """
    temperature, top_p, min_p = (np.float64(f) for f in fparams[:3])
    p = np.exp((np.float64(x) - np.max(x)) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = p[order] >= min_p * p[order[0]]
    if top_k > 0:
        keep &= np.arange(len(p)) < top_k
    q = np.where(keep, p[order], 0)
    before = np.cumsum(q) - q
    keep &= before < top_p * q.sum()
    keep[0] = True
    mask = np.zeros(len(p), bool)
    mask[order[keep]] = True
    return p, mask


@op(
    "(logits: f32[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], tokens: state i32[m, l],"
    " fparams: state f32[m, 8], iparams: state i32[m, 8]) -> i32[r]", flops="8*r*v", bytes="4*r*v",
    example=_example(_SAMPLED),
)  # fmt: skip
def row_sample(logits: Any, rows: Any, starts: Any, positions: Any, tokens: Any, fparams: Any, iparams: Any) -> Any:
    """Choose one id per entry.

    Within the prompt (iparams[row, 3] tokens) it is the prompt's next token. With temperature 0 it is the largest
    logit, the lowest id among equals. Otherwise the ids kept by temperature, min_p, top_k and top_p are sampled in id
    order by inverting their cumulative probability at uniform(seed, position of the new token). Padding rows give 0.
    """
    out = np.zeros(len(rows), np.int32)
    for i, (row, end) in enumerate(zip(rows, ends(rows, starts, positions), strict=True)):
        if row < 0:
            continue
        if end < iparams[row, 3]:
            out[i] = tokens[row, end]
            continue
        if fparams[row, 0] == 0:
            out[i] = np.argmax(logits[i])
            continue
        p, mask = kept(logits[i], fparams[row], int(iparams[row, 0]))
        lo, hi = (int(s) & 0xFFFFFFFF for s in iparams[row, 1:3])
        cum = np.cumsum(np.where(mask, p, 0))
        at = int(np.searchsorted(cum, uniform(lo | hi << 32, int(end)) * cum[-1], "right"))
        out[i] = min(at, int(np.nonzero(mask & (p > 0))[0][-1]))
    return out


def _blocks_types(env: dict[str, Any], attrs: Any) -> list[Type]:
    if attrs["block"] < 1:
        raise Mismatch(f"block={attrs['block']} must be at least 1")
    shape = (env["r"], env["v"].ceildiv(attrs["block"]))
    return [Type("f32", shape), Type("i32", shape), Type("f32", shape)]


def _blocks_example(rng: Any) -> Any:
    return _example(_BLOCKS)(rng)[0], {"block": 16}


@op(
    "(logits: f[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], fparams: state f32[m, 8],"
    " iparams: state i32[m, 8], stops: state i32[m, s], seen: state i32[m, w], counts: state i32[m, v],"
    " bias_ids: state i32[m, b], biases: state f32[m, b], allowed: state i32[m, w])"
    " -> (best: f32[r, n], ids: i32[r, n], sums: f32[r, n])",
    flops="8*r*v", bytes="r*v*bytes_logits", infer=_blocks_types, example=_blocks_example,
)  # fmt: skip
def row_block_max(
    logits: Any, rows: Any, starts: Any, positions: Any, fparams: Any, iparams: Any, stops: Any, seen: Any,
    counts: Any, bias_ids: Any, biases: Any, allowed: Any, *, block: int,
) -> Any:  # fmt: skip
    """The first phase of row_sample over row_mask over row_penalize, per block of ids.

    For each block: the largest logit, its lowest id, and, in rows with a temperature, the sum of exp((logit - largest)
    / temperature). Padding rows give 0.
    """
    x = row_penalize.ref(logits, rows, fparams, iparams, seen, counts, bias_ids, biases)
    x = row_mask.ref(x, rows, starts, positions, iparams, stops, allowed)
    r, v = x.shape
    n = -(-v // block)
    x = np.concatenate([x, np.full((r, n * block - v), -np.inf, x.dtype)], 1).reshape(r, n, block)
    top = np.argmax(x, -1)
    best = np.take_along_axis(x, top[..., None], -1)
    t = fparams[np.maximum(rows, 0), 0][:, None, None]
    e = np.exp(np.where(x == best, 0, x - best) / np.where(t > 0, t, 1)) * (np.arange(n * block) < v).reshape(n, block)
    live = (rows >= 0)[:, None]
    sums = np.where(live & (t[..., 0] > 0), e.sum(-1), 0)
    return np.where(live, best[..., 0], 0), np.where(live, top + np.arange(n) * block, 0), sums


def _picks_example(rng: Any) -> Any:
    entries = _entries(rng)
    operands = [entries[name] for name in _BLOCKS]
    best, ids, sums = row_block_max.ref(*operands, block=16)
    found = [best.astype(np.float32), ids.astype(np.int32), sums.astype(np.float32)]
    return [*operands, entries["tokens"], *found], {"block": 16}


@op(
    "(logits: f[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], fparams: state f32[m, 8],"
    " iparams: state i32[m, 8], stops: state i32[m, s], seen: state i32[m, w], counts: state i32[m, v],"
    " bias_ids: state i32[m, b], biases: state f32[m, b], allowed: state i32[m, w], tokens: state i32[m, l],"
    " best: f32[r, n], ids: i32[r, n], sums: f32[r, n]) -> i32[r]",
    flops="8*r*v", bytes="12*r*n + r*v*bytes_logits", example=_picks_example,
)  # fmt: skip
def row_sample_blocks(
    logits: Any, rows: Any, starts: Any, positions: Any, fparams: Any, iparams: Any, stops: Any, seen: Any,
    counts: Any, bias_ids: Any, biases: Any, allowed: Any, tokens: Any, best: Any, ids: Any, sums: Any, *, block: int,
) -> Any:  # fmt: skip
    """The second phase: the id that row_sample gives for the penalized and masked logits.

    It uses the results of row_block_max for blocks of `block` ids; greedy rows need not read the logits again.
    """
    x = row_penalize.ref(logits, rows, fparams, iparams, seen, counts, bias_ids, biases)
    x = row_mask.ref(x, rows, starts, positions, iparams, stops, allowed)
    return row_sample.ref(x, rows, starts, positions, tokens, fparams, iparams)


def _logprobs_example(rng: Any) -> Any:
    i32 = np.int32
    wants = np.zeros((3, 8), i32)
    wants[[0, 2], 5] = 1
    logits, ids = rng.standard_normal((4, 41)).astype(np.float32), rng.integers(0, 41, 4).astype(i32)
    return [logits, ids, np.array([2, 1, -1, 0], i32), wants], {"k": 5}


@op(
    "(logits: f[r, v], ids: i32[r], rows?: i32[r], iparams?: state i32[m, 8])"
    " -> (logprob: f32[r], rank: i32[r], top_ids: i32[r, k], top_logprobs: f32[r, k])",
    flops="4*r*v", bytes="r*v*bytes_logits", example=_logprobs_example,
)  # fmt: skip
def row_logprobs(logits: Any, ids: Any, rows: Any = None, iparams: Any = None, *, k: int = 20) -> Any:
    """Log-probabilities of the raw logits: of the sampled id with its rank (1: the largest), and of the k largest ids.

    Results are zero for padding rows and for rows that did not request them (iparams[row, 5] is 0).
    """
    x = logits - np.max(logits, -1, keepdims=True)
    lp = x - np.log(np.exp(x).sum(-1, keepdims=True))
    own = np.take_along_axis(lp, ids[:, None].astype(np.int64), -1)
    top = np.argsort(-lp, -1, kind="stable")[:, :k]
    out = own[:, 0], (lp > own).sum(-1) + 1, top, np.take_along_axis(lp, top, -1)
    if rows is None or iparams is None:
        return out
    requested = (rows >= 0) & (iparams[np.maximum(rows, 0), 5] != 0)
    return tuple(np.where(requested if a.ndim == 1 else requested[:, None], a, 0) for a in out)


def _finish_example(rng: Any) -> Any:
    operands, attrs = _picks_example(rng)
    return [*operands, np.array([1, 5, 4], np.int32), np.array([1, 0, 1], np.int32)], {**attrs, "k": 5}


@op(
    "(logits: f[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], fparams: state f32[m, 8],"
    " iparams: state i32[m, 8], stops: state i32[m, s], seen: state i32[m, w], counts: state i32[m, v],"
    " bias_ids: state i32[m, b], biases: state f32[m, b], allowed: state i32[m, w], tokens: state i32[m, l],"
    " best: f32[r, n], ids: i32[r, n], sums: f32[r, n], length: state i32[m], emit: i32[r])"
    " -> (drawn: i32[r], logprob: f32[r], rank: i32[r], top_ids: i32[r, k], top_logprobs: f32[r, k],"
    " history: state i32[m, l], lengths: state i32[m], c: state i32[m, v])",
    writes=("tokens", "length", "counts"), flops="8*r*v", bytes="12*r*n + r*v*bytes_logits", example=_finish_example,
)  # fmt: skip
def row_finish(
    logits: Any, rows: Any, starts: Any, positions: Any, fparams: Any, iparams: Any, stops: Any, seen: Any,
    counts: Any, bias_ids: Any, biases: Any, allowed: Any, tokens: Any, best: Any, ids: Any, sums: Any, length: Any,
    emit: Any, *, block: int, k: int = 20,
) -> Any:  # fmt: skip
    """row_sample_blocks, then row_logprobs of the raw logits, then row_commit: everything after row_block_max."""
    states = (fparams, iparams, stops, seen, counts, bias_ids, biases, allowed, tokens)
    drawn = row_sample_blocks.ref(logits, rows, starts, positions, *states, best, ids, sums, block=block)
    logprobs = row_logprobs.ref(logits, drawn, rows, iparams, k=k)
    return drawn, *logprobs, *row_commit.ref(tokens, length, counts, rows, starts, positions, emit, drawn)


OPS = tuple(v for v in globals().values() if isinstance(v, OpDef))
