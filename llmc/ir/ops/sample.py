"""Sampling in the graph: penalties, masks, the draw and log-probabilities; a step answers ids, not logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..opdef import OpDef, op

_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone: splitmix64 (Steele, Lea, Flood 2014) of both."""
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
    i[:, 3], i[:, 4] = 2, rng.integers(2, 12, rows)
    return i


def _penalize_example(rng: Any) -> Any:
    rows = np.array([2, 0, -1], np.int32)
    seen = rng.integers(-(2**31), 2**31, (3, 2)).astype(np.int32)
    counts = rng.integers(0, 3, (3, 41)).astype(np.int32)
    return [rng.standard_normal((3, 41)).astype(np.float32), rows, _fparams(rng, 3), seen, counts], {}


@op(
    "(logits: f[r, v], rows: i32[r], fparams: state f32[m, 8], seen: state i32[m, w], counts: state i32[m, v])"
    " -> f32[r, v]", flops="4*r*v", bytes="r*v*bytes_logits + 8*r*v", example=_penalize_example,
)  # fmt: skip
def row_penalize(logits: Any, rows: Any, fparams: Any, seen: Any, counts: Any) -> Any:
    """Repetition (Keskar et al. 2019, arXiv 1909.05858; over prompt and output), frequency and presence penalties
    (output alone). `seen` is a bitmap of the prompt's ids, bit id % 32 of word id // 32."""
    out = np.array(logits)
    v = out.shape[1]
    for i, row in enumerate(rows):
        if row < 0:
            continue
        rep, presence, frequency = fparams[row, 3:6]
        bits = (seen[row, np.arange(v) // 32].view(np.uint32) >> (np.arange(v) % 32).astype(np.uint32)) & 1
        n = counts[row]
        x = out[i]
        x = np.where((bits > 0) | (n > 0), np.where(x > 0, x / rep, x * rep), x)
        out[i] = x - frequency * n - presence * (n > 0)
    return out


def _stops_example(rng: Any) -> Any:
    i32 = np.int32
    stops = np.full((3, 32), -1, i32)
    stops[:, :2] = rng.integers(0, 41, (3, 2))
    rows, qlens = np.array([2, 0, -1], i32), np.array([3, 1, 0], i32)
    return [rng.standard_normal((3, 41)), rows, qlens, np.array([5, 3, 1], i32), _iparams(rng, 3), stops], {}


@op(
    "(logits: f32[r, v], rows: i32[r], qlens: i32[r], length: state i32[m], iparams: state i32[m, 8],"
    " stops: state i32[m, s]) -> f32[r, v]", bytes="8*r*v", example=_stops_example,
)  # fmt: skip
def row_mask_stops(logits: Any, rows: Any, qlens: Any, length: Any, iparams: Any, stops: Any) -> Any:
    """min_tokens: the row's stop ids (-1: none) are -inf until its length reaches min_len."""
    out = np.array(logits)
    for i, row in enumerate(rows):
        if row >= 0 and length[row] + qlens[i] < iparams[row, 4]:
            out[i, stops[row][stops[row] >= 0]] = -np.inf
    return out


def kept(x: Any, fparams: Any, top_k: int) -> tuple[Any, Any]:
    """(probabilities, which ids stay) for one row of logits: temperature, then min_p, top_k, top_p (Holtzman et al.
    2020, arXiv 1904.09751). Among equals the lower id is the larger."""
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


def _sample_example(rng: Any) -> Any:
    i32 = np.int32
    rows, qlens = np.array([2, 0, 1, -1], i32), np.array([3, 1, 1, 0], i32)
    logits = rng.standard_normal((4, 41)).astype(np.float32) * 3
    return [logits, rows, qlens, np.array([5, 3, 1], i32), _fparams(rng, 3), _iparams(rng, 3)], {}


@op(
    "(logits: f32[r, v], rows: i32[r], qlens: i32[r], length: state i32[m], fparams: state f32[m, 8],"
    " iparams: state i32[m, 8]) -> i32[r]", flops="8*r*v", bytes="4*r*v", example=_sample_example,
)  # fmt: skip
def row_sample(logits: Any, rows: Any, qlens: Any, length: Any, fparams: Any, iparams: Any) -> Any:
    """One id a row. Temperature 0: the largest logit, the lowest id among equals. Otherwise the ids that temperature,
    min_p, top_k and top_p keep, in id order, are drawn from by inverting their cumulative probability at
    uniform(seed, position of the new token). Padding rows give 0."""
    out = np.zeros(len(rows), np.int32)
    for i, row in enumerate(rows):
        if row < 0:
            continue
        if fparams[row, 0] == 0:
            out[i] = np.argmax(logits[i])
            continue
        p, mask = kept(logits[i], fparams[row], int(iparams[row, 0]))
        lo, hi = (int(s) & 0xFFFFFFFF for s in iparams[row, 1:3])
        cum = np.cumsum(np.where(mask, p, 0))
        at = int(np.searchsorted(cum, uniform(lo | hi << 32, int(length[row] + qlens[i])) * cum[-1], "right"))
        out[i] = min(at, int(np.nonzero(mask)[0][-1]))
    return out


def _logprobs_example(rng: Any) -> Any:
    return [rng.standard_normal((3, 41)).astype(np.float32), rng.integers(0, 41, 3).astype(np.int32)], {"k": 5}


@op(
    "(logits: f[r, v], ids: i32[r]) -> (logprob: f32[r], rank: i32[r], top_ids: i32[r, k], top_logprobs: f32[r, k])",
    flops="4*r*v", bytes="r*v*bytes_logits", example=_logprobs_example,
)  # fmt: skip
def row_logprobs(logits: Any, ids: Any, *, k: int = 20) -> Any:
    """Log-probabilities of the raw logits: the drawn id's, its rank (1: the largest), and the k largest with ids."""
    x = logits - np.max(logits, -1, keepdims=True)
    lp = x - np.log(np.exp(x).sum(-1, keepdims=True))
    own = np.take_along_axis(lp, ids[:, None].astype(np.int64), -1)
    top = np.argsort(-lp, -1, kind="stable")[:, :k]
    return own[:, 0], (lp > own).sum(-1) + 1, top, np.take_along_axis(lp, top, -1)


OPS = tuple(v for v in globals().values() if isinstance(v, OpDef))
