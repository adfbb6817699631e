"""Sampling inside the graph: penalties, masks, random draw and log-probabilities. A step returns ids, not logits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS, INT_COLUMNS

from llmc.ir import contents
from llmc.ir.contents import Content, Drawing, Shape
from llmc.ir.opdef import op
from llmc.ir.ops.state import HOLDS, ends, row_commit
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type

_MASK64 = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # increment of SplitMix64


def param(values: Any, name: str) -> Any:
    """Return a sampling parameter of rows; `values` are their fparams or iparams, [..., 8]."""
    return values[..., (FLOAT_COLUMNS if name in FLOAT_COLUMNS else INT_COLUMNS).index(name)]


def exponentials(seed: int, position: int, ids: Any) -> Any:
    """Return the exponential random variables of token ids for a draw, float64[len(ids)], positive.

    Each is determined by (seed, position, id): the upper half of the output number `id` of a SplitMix64 generator
    (Steele, Lea, Flood 2014), which is seeded with (seed, position), and the inverse of the exponential distribution.
    """
    key = _mix(_mix(np.uint64(seed & _MASK64)) ^ np.uint64(position & _MASK64))
    with np.errstate(over="ignore"):
        high = _mix(key + np.asarray(ids, np.uint64) * _GAMMA) >> np.uint64(32)
    return -np.log1p(-(np.float64(high) + 0.5) * 2.0**-32)


def _mix(z: Any) -> Any:
    """Return the output of SplitMix64 for a state, or for an array of states."""
    with np.errstate(over="ignore"):
        z = z + _GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _block_maximum(result: int) -> Content:
    """Return a result of row_block_max on the node's other operands; in drawings that are not exact, one in range."""

    def draw(d: Drawing, shape: Shape) -> Any:
        if not d.exact:
            return np.resize(np.arange(shape[-1]) * d.attrs["block"], shape)
        operands = [slot.name for slot in row_block_max.operands]
        results = d.shared("blocks", lambda: row_block_max.ref(*map(d.operand, operands), block=d.attrs["block"]))
        return results[result]

    return draw


_HOLDS: Mapping[str, Content] = MappingProxyType(
    {
        **HOLDS, "logits": contents.logits, "fparams": contents.fparams, "iparams": contents.iparams,
        "stops": contents.stops, "seen": contents.seen, "bias_ids": contents.bias_ids, "biases": contents.biases,
        "allowed": contents.allowed,
    }
)  # fmt: skip
_OF_BLOCKS: Mapping[str, Content] = MappingProxyType(
    {**_HOLDS, "best": _block_maximum(0), "ids": _block_maximum(1), "scores": _block_maximum(2)}
)
# A step with three entries over 41 ids, for examples.
_SIZES: Mapping[str, Any] = MappingProxyType(
    {"r": 3, "v": 41, "t": 5, "m": 3, "s": 32, "w": 2, "a": 4, "b": 8, "l": 12, "n": 3}
)


@op(
    "(logits: f[r, v], rows: i32[r], fparams: state f32[m, 8], iparams: state i32[m, 8], seen: state i32[m, w],"
    " counts: state i32[m, v], bias_ids: state i32[m, b], biases: state f32[m, b], starts?: i32[r+1],"
    " positions?: i32[t], tokens?: state i32[m, l]) -> f32[r, v]",
    flops="4*r*v", bytes="r*v*bytes_logits + 8*r*v", holds=_HOLDS, example=_SIZES,
)  # fmt: skip
def row_penalize(
    logits: Any, rows: Any, fparams: Any, iparams: Any, seen: Any, counts: Any, bias_ids: Any, biases: Any,
    starts: Any = None, positions: Any = None, tokens: Any = None,
) -> Any:  # fmt: skip
    """Apply logit_bias, then the repetition, frequency and presence penalties.

    The biases are those of the row's first num_biases ids, in ascending order. The repetition penalty (Keskar et al.
    2019, arXiv 1909.05858) covers prompt and output, the others only the output. `seen` is a bitmap of the prompt's
    ids: bit id % 32 of word id // 32. With `tokens`, an entry also counts as output the drafted tokens that precede its
    new one (see row_accept): the last tokens of the row's entries after its first, up to this entry, after the prompt.
    """
    out = np.array(logits)
    v = out.shape[1]
    for i, row in enumerate(rows):
        if row < 0:
            continue
        count = param(iparams[row], "num_biases")
        out[i, bias_ids[row, :count]] += biases[row, :count]
        n = counts[row]
        if tokens is not None:
            n = n + np.bincount(_drafted(rows, starts, positions, tokens, iparams, i), minlength=v)[:v]
        out[i] = _penalized(out[i], fparams[row], _bits(seen[row], v), n)
    return out


def _penalized(x: Any, f: Any, prompted: Any, n: Any) -> Any:
    """Return a row of logits [v] with penalties; per id: whether it is `prompted`, and its count `n` in the output."""
    repeated = prompted | (n > 0)
    repetition = param(f, "repetition_penalty")
    x = np.where(repeated, np.where(x > 0, x / repetition, x * repetition), x)
    return x - param(f, "frequency_penalty") * n - param(f, "presence_penalty") * (n > 0)


def _drafted(rows: Any, starts: Any, positions: Any, tokens: Any, iparams: Any, entry: int) -> list[int]:
    """Return the drafted ids that precede the entry's new token."""
    row, out = rows[entry], []
    prompt = param(iparams[row], "prompt_len")
    while entry > 0 and rows[entry - 1] == row and (at := positions[starts[entry + 1] - 1]) >= prompt:
        out.append(int(tokens[row, at]))
        entry -= 1
    return out


def _bits(words: Any, v: int) -> Any:
    """Return the first v bits of a bitmap, as bools."""
    return (words[np.arange(v) // 32].view(np.uint32) >> (np.arange(v) % 32).astype(np.uint32)) & 1 != 0


@op(
    "(logits: f32[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], iparams: state i32[m, 8],"
    " stops: state i32[m, s], allowed: state i32[m, a]) -> f32[r, v]", bytes="8*r*v", holds=_HOLDS,
    example=_SIZES,
)  # fmt: skip
def row_mask(logits: Any, rows: Any, starts: Any, positions: Any, iparams: Any, stops: Any, allowed: Any) -> Any:
    """Set logits of forbidden ids to -inf.

    The row's stop ids (-1: none) are forbidden until its length reaches min_len. If `masked` is not 0, so are all ids
    that are not in a bitmap of `allowed` (bit id % 32 of word id // 32). `masked` is the number of the row's bitmaps,
    which lie side by side: the token at position p has bitmap p % masked, so that an entry that verifies a draft has
    one of its own. A row with more bitmaps than `allowed` has room for is not masked: a draft model has no bitmaps for
    its positions.
    """
    out = np.array(logits)
    words = -(-out.shape[1] // 32)
    for i, (row, end) in enumerate(zip(rows, ends(rows, starts, positions), strict=True)):
        if row >= 0 and end < param(iparams[row], "min_len"):
            out[i, stops[row][stops[row] >= 0]] = -np.inf
        count = int(param(iparams[row], "masked"))
        if row >= 0 and 0 < count <= allowed.shape[1] // words:
            out[i, ~_bits(allowed[row, int(end) % count * words :], out.shape[1])] = -np.inf
    return out


def kept(x: Any, fparams: Any, top_k: int) -> tuple[Any, Any]:
    """Return the probabilities of one row of logits, and a mask of the ids that the filters keep.

    Applied in this order: temperature, min_p, top_k, top_p (Holtzman et al. 2020, arXiv 1904.09751). Among equal
    probabilities, the lower id ranks first.
    """
    temperature, top_p, min_p = (np.float64(param(fparams, name)) for name in ("temperature", "top_p", "min_p"))
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
    holds=_HOLDS, example=_SIZES,
)  # fmt: skip
def row_sample(logits: Any, rows: Any, starts: Any, positions: Any, tokens: Any, fparams: Any, iparams: Any) -> Any:
    """Choose one id per entry.

    Within the prompt (prompt_len tokens) it is the prompt's next token. With temperature 0 it is the largest logit, the
    lowest id among equals. Otherwise, of the ids that temperature, min_p, top_k and top_p keep, it is the one with the
    largest quotient of its probability and its exponential random variable for (seed, position of the new token): a
    sample of their distribution by the Gumbel-max trick (Maddison et al. 2014, arXiv 1411.0030). Two models that sample
    with the same seed agree almost as often as is possible (Daliri et al. 2024, arXiv 2408.07978), so that drafts which
    are sampled are accepted. Padding rows give 0.
    """
    out = np.zeros(len(rows), np.int32)
    for i, (row, end) in enumerate(zip(rows, ends(rows, starts, positions), strict=True)):
        if row < 0:
            continue
        if end < param(iparams[row], "prompt_len"):
            out[i] = tokens[row, end]
            continue
        if param(fparams[row], "temperature") == 0:
            out[i] = np.argmax(logits[i])
            continue
        p, mask = kept(logits[i], fparams[row], int(param(iparams[row], "top_k")))
        out[i] = np.argmax(np.where(mask, p / row_exponentials(iparams[row], int(end), len(p)), -1))
    return out


def row_exponentials(iparams: Any, position: int, vocabulary: int) -> Any:
    """Return the exponential random variables of all ids for a row's draw of the token at `position`."""
    lo, hi = (int(param(iparams, half)) & 0xFFFFFFFF for half in ("seed_lo", "seed_hi"))
    return exponentials(lo | hi << 32, position, np.arange(vocabulary))


def _filters(fparams: Any, iparams: Any, vocabulary: int) -> bool:
    """Return whether top_p, min_p or top_k may exclude ids of a row."""
    top_k = int(param(iparams, "top_k"))
    return bool(param(fparams, "top_p") < 1 or param(fparams, "min_p") > 0 or 0 < top_k < vocabulary)


def _blocks_types(env: dict[str, Any], attrs: Any) -> list[Type]:
    if attrs["block"] < 1:
        raise Mismatch(f"block={attrs['block']} must be at least 1")
    shape = (env["r"], env["v"].ceildiv(attrs["block"]))
    return [Type("f32", shape), Type("i32", shape), Type("f32", shape)]


@op(
    "(logits: f[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], fparams: state f32[m, 8],"
    " iparams: state i32[m, 8], stops: state i32[m, s], seen: state i32[m, w], counts: state i32[m, v],"
    " bias_ids: state i32[m, b], biases: state f32[m, b], allowed: state i32[m, a])"
    " -> (best: f32[r, n], ids: i32[r, n], scores: f32[r, n])",
    flops="8*r*v", bytes="r*v*bytes_logits", infer=_blocks_types, holds=_HOLDS,
    example={**_SIZES, "block": 16},
)  # fmt: skip
def row_block_max(
    logits: Any, rows: Any, starts: Any, positions: Any, fparams: Any, iparams: Any, stops: Any, seen: Any,
    counts: Any, bias_ids: Any, biases: Any, allowed: Any, *, block: int,
) -> Any:  # fmt: skip
    """The first phase of row_sample over row_mask over row_penalize, per block of ids.

    For each block: the largest logit, an id, and its score. In rows with a temperature that no filter (top_p, min_p,
    top_k) limits, it is the id with the largest score: exp((logit - largest) / temperature), divided by the
    exponential random variable of the id. In other rows it is the lowest id of the largest logit, and the score is 0.
    Padding rows give 0.
    """
    x = row_penalize.ref(logits, rows, fparams, iparams, seen, counts, bias_ids, biases)
    x = row_mask.ref(x, rows, starts, positions, iparams, stops, allowed)
    entries, vocab = x.shape
    blocks = -(-vocab // block)
    is_id = (np.arange(blocks * block) < vocab).reshape(blocks, block)  # the last block is padded
    padding = np.full((entries, blocks * block - vocab), -np.inf, x.dtype)
    x = np.concatenate([x, padding], 1).reshape(entries, blocks, block)
    chosen = np.argmax(x, -1)  # within the block
    best = np.take_along_axis(x, chosen[..., None], -1)
    temperature = param(fparams[np.maximum(rows, 0)], "temperature")[:, None, None]
    distance = np.where(x == best, 0, x - best)  # infinite logits, too, are equal to themselves
    weights = np.exp(distance / np.where(temperature > 0, temperature, 1)) * is_id
    scores = np.zeros((entries, blocks))
    for i, (row, end) in enumerate(zip(rows, ends(rows, starts, positions), strict=True)):
        if row >= 0 and temperature[i, 0, 0] > 0 and not _filters(fparams[row], iparams[row], vocab):
            weights[i] /= row_exponentials(iparams[row], int(end), blocks * block).reshape(blocks, block)
            chosen[i], scores[i] = np.argmax(weights[i], -1), np.max(weights[i], -1)
    live = (rows >= 0)[:, None]
    return np.where(live, best[..., 0], 0), np.where(live, chosen + np.arange(blocks) * block, 0), scores


@op(
    "(logits: f[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], fparams: state f32[m, 8],"
    " iparams: state i32[m, 8], stops: state i32[m, s], seen: state i32[m, w], counts: state i32[m, v],"
    " bias_ids: state i32[m, b], biases: state f32[m, b], allowed: state i32[m, a], tokens: state i32[m, l],"
    " best: f32[r, n], ids: i32[r, n], scores: f32[r, n]) -> i32[r]",
    flops="8*r*v", bytes="12*r*n + r*v*bytes_logits", holds=_OF_BLOCKS,
    example={**_SIZES, "block": 16},
)  # fmt: skip
def row_sample_blocks(
    logits: Any, rows: Any, starts: Any, positions: Any, fparams: Any, iparams: Any, stops: Any, seen: Any,
    counts: Any, bias_ids: Any, biases: Any, allowed: Any, tokens: Any, best: Any, ids: Any, scores: Any, *, block: int,
) -> Any:  # fmt: skip
    """The second phase: the id that row_sample gives for the penalized and masked logits.

    It uses the results of row_block_max for blocks of `block` ids; greedy rows need not read the logits again.
    """
    x = row_penalize.ref(logits, rows, fparams, iparams, seen, counts, bias_ids, biases)
    x = row_mask.ref(x, rows, starts, positions, iparams, stops, allowed)
    return row_sample.ref(x, rows, starts, positions, tokens, fparams, iparams)


@op(
    "(logits: f[r, v], ids: i32[r], rows?: i32[r], iparams?: state i32[m, 8])"
    " -> (logprob: f32[r], rank: i32[r], top_ids: i32[r, k], top_logprobs: f32[r, k])",
    flops="4*r*v", bytes="r*v*bytes_logits", holds=_HOLDS,
    example={**_SIZES, "r": 4, "k": 5},
)  # fmt: skip
def row_logprobs(logits: Any, ids: Any, rows: Any = None, iparams: Any = None, *, k: int = 20) -> Any:
    """Log-probabilities of the raw logits: of the sampled id with its rank (1: the largest), and of the k largest ids.

    Results are zero for padding rows and for rows that did not request them (want_logprobs is 0).
    """
    x = logits - np.max(logits, -1, keepdims=True)
    lp = x - np.log(np.exp(x).sum(-1, keepdims=True))
    sampled = np.take_along_axis(lp, ids[:, None].astype(np.int64), -1)
    top = np.argsort(-lp, -1, kind="stable")[:, :k]
    out = sampled[:, 0], (lp > sampled).sum(-1) + 1, top, np.take_along_axis(lp, top, -1)
    if rows is None or iparams is None:
        return out
    requested = (rows >= 0) & (param(iparams[np.maximum(rows, 0)], "want_logprobs") != 0)
    return tuple(np.where(requested if a.ndim == 1 else requested[:, None], a, 0) for a in out)


@op(
    "(logits: f[r, v], rows: i32[r], starts: i32[r+1], positions: i32[t], fparams: state f32[m, 8],"
    " iparams: state i32[m, 8], stops: state i32[m, s], seen: state i32[m, w], counts: state i32[m, v],"
    " bias_ids: state i32[m, b], biases: state f32[m, b], allowed: state i32[m, a], tokens: state i32[m, l],"
    " best: f32[r, n], ids: i32[r, n], scores: f32[r, n], length: state i32[m], emit: i32[r])"
    " -> (drawn: i32[r], logprob: f32[r], rank: i32[r], top_ids: i32[r, k], top_logprobs: f32[r, k],"
    " history: state i32[m, l], lengths: state i32[m], c: state i32[m, v])",
    writes=("tokens", "length", "counts"), flops="8*r*v", bytes="12*r*n + r*v*bytes_logits", holds=_OF_BLOCKS,
    example={**_SIZES, "block": 16, "k": 5},
)  # fmt: skip
def row_finish(
    logits: Any, rows: Any, starts: Any, positions: Any, fparams: Any, iparams: Any, stops: Any, seen: Any,
    counts: Any, bias_ids: Any, biases: Any, allowed: Any, tokens: Any, best: Any, ids: Any, scores: Any, length: Any,
    emit: Any, *, block: int, k: int = 20,
) -> Any:  # fmt: skip
    """row_sample_blocks, then row_logprobs of the raw logits, then row_commit: everything after row_block_max."""
    states = (fparams, iparams, stops, seen, counts, bias_ids, biases, allowed, tokens)
    drawn = row_sample_blocks.ref(logits, rows, starts, positions, *states, best, ids, scores, block=block)
    logprobs = row_logprobs.ref(logits, drawn, rows, iparams, k=k)
    return drawn, *logprobs, *row_commit.ref(tokens, length, counts, rows, starts, positions, emit, drawn)
