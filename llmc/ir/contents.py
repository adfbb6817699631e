"""The contents of an op's operands, and random values of that kind, for `--check`, `llmc tune` and the tests.

An op declares it per operand, `holds={"idx": index("x")}`: a content is a function of a `Drawing` (one node with its
shapes and attributes) and the operand's shape. The rows, positions and pages of a node agree because they are drawn
from one `Step`. An operand without a content holds arbitrary numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from llmc_runtime.format.row_abi import DRAFT_COLUMNS
from llmc_runtime.sched.row_columns import FLOAT_COLUMNS, INT_COLUMNS, OFF

from llmc.ir.dtype import DTYPES

Array = np.ndarray
Shape = tuple[int, ...]
EVERY_THIRD = 0x49249249  # bits 0, 3, 6, ... of a word


@dataclass(frozen=True)
class Step:
    """One step of the device, from which the rows, positions and pages of a node are drawn.

    rows: i[r], the device row of each entry, -1 for padding; entries of one device row are adjacent. qlens: i[r], the
    tokens of each entry. before: i[m], computed tokens of each device row. tokens: length of the flat token axis, which
    ends with padding if it is longer than the sum of qlens. pages, page: number of KV pages and tokens per page.
    vocabulary: exclusive upper bound of token ids. greedy: rows have default sampling parameters and no penalties.
    """

    rows: Array
    qlens: Array
    before: Array
    tokens: int
    pages: int = 8
    page: int = 1
    vocabulary: int = 3
    greedy: bool = False

    @staticmethod
    def serving(rows: int, tokens: int, context: int, pages: int, page: int) -> Step:
        """Return a typical greedy step: the last row has the next tokens of a prompt, all others one token.

        Every row ends at position context - 1, or later if it has more tokens.
        """
        qlens = np.ones(max(1, rows), np.int64)
        qlens[-1] = max(1, tokens - len(qlens) + 1)
        before = np.maximum(context - qlens, 0)
        return Step(np.arange(len(qlens)), qlens, before, tokens, pages, page, greedy=True)

    @staticmethod
    def random(
        rng: np.random.Generator, *, entries: int, tokens: int, rows: int, limit: int, padding: bool = False,
        **more: Any,
    ) -> Step:  # fmt: skip
        """Draw a step of `entries` entries over `rows` device rows, each of at most `limit` tokens.

        Without padding, the tokens are divided evenly. With padding, the last of three or more entries is padding, two
        adjacent entries of four or more belong to one device row, and one random entry has the tokens of a prompt.
        """
        live = entries - 1 if padding and entries > 2 else entries
        distinct = live - 1 if padding and entries > 3 else live
        order = np.full(entries, -1)
        order[:distinct] = rng.permutation(max(rows, distinct))[:distinct]
        qlens = np.zeros(entries, np.int64)
        if padding:
            spare = int(rng.integers(0, 2)) if tokens > live + 1 and live < entries else 0
            if distinct < live:
                order[2:live] = order[1:distinct]
            qlens[:live] = 1
            qlens[rng.integers(0, live)] += max(0, min(tokens - live - (live < entries), limit - 2))
            qlens[live:] = spare
        else:
            qlens += tokens // entries
            qlens[: tokens % entries] += 1
        new_tokens = np.bincount(order[:live], qlens[:live], rows).astype(np.int64)
        before = rng.integers(0, np.maximum(limit - new_tokens, 0) + 1)
        return Step(order, qlens, before, tokens, **more)

    @cached_property
    def starts(self) -> Array:
        """The offset of each entry's first token on the flat axis, and the total: i[r + 1]."""
        return np.concatenate([[0], np.cumsum(self.qlens)])

    @cached_property
    def token_row(self) -> Array:
        """The device row of each flat token, -1 for padding: i[tokens]."""
        row = np.repeat(self.rows, self.qlens)[: self.tokens]
        return np.pad(row, (0, self.tokens - len(row)), constant_values=-1)

    @cached_property
    def positions(self) -> Array:
        """The position of each flat token in its sequence, -1 for padding: i[tokens]."""
        first = self.starts[:-1].copy()
        for i in range(1, len(first)):
            if self.rows[i] == self.rows[i - 1]:
                first[i] = first[i - 1]
        at = np.arange(self.tokens) - np.resize(np.repeat(first, self.qlens), self.tokens)
        return np.where(self.token_row >= 0, self.before[self.token_row] + at, -1)

    def per_token(self, values: Array, shape: Shape) -> Array:
        """Return `values` of the flat tokens; if there is one per entry, those of the entries' first tokens."""
        if shape[0] != self.tokens and shape[0] <= len(self.rows):
            values = values[self.starts[: shape[0]]]
        return np.resize(values, shape)


@dataclass
class Drawing:
    """The operands of one node, drawn on demand: shapes and dtypes by operand name, attributes, contents and a step.

    exact: operands that are results of other operands (`row_sample_blocks.best`) are computed from them; if not exact,
    they are merely in range. scale: arbitrary floats are divided by the root of their last size, as in a deep model.
    """

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]
    attrs: Mapping[str, Any]
    holds: Mapping[str, Content]
    step: Step
    rng: np.random.Generator
    exact: bool = True
    scale: bool = False
    drawn: dict[str, Any] = field(default_factory=dict)

    def operand(self, name: str) -> Array:
        """Return the values of an operand in the numpy type of its dtype (bf16 and f16 as float32)."""
        return self.shared(name, lambda: self.draw(name, self.shapes[name], self.dtypes[name]))

    def shared(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the value that `make` returned at the first call with this key, so that operands share it."""
        if key not in self.drawn:
            self.drawn[key] = make()
        return self.drawn[key]

    def draw(self, name: str, shape: Shape, dtype: str) -> Array:
        """Draw values of the operand `name` with another shape and dtype than the node's own."""
        content = self.holds.get(name)
        values = content(self, shape) if content else arbitrary(self.rng, shape, DTYPES[dtype].kind, self.scale)
        wide = {"f": np.float32, "b": np.bool_}.get(DTYPES[dtype].kind, DTYPES[dtype].np)
        return np.ascontiguousarray(values, wide).reshape(shape)

    @property
    def vocabulary(self) -> int:
        """Exclusive upper bound of token ids: the width of the logits or counts, else the step's vocabulary."""
        sized = [self.shapes[n][-1] for n, c in self.holds.items() if c in (logits, counts) and n in self.shapes]
        return sized[0] if sized else self.step.vocabulary


Content = Callable[[Drawing, Shape], Array]


def arbitrary(rng: np.random.Generator, shape: Shape, kind: str, scale: bool = False) -> Array:
    """Draw numbers of a dtype kind: floats standard normal, integers 0 to 2, bools with equal probability.

    scale: matrices are divided by the root of their last size, vectors are near 1, as the weights of a model are.
    """
    if kind == "b":
        return rng.random(shape) > 0.5
    if kind == "i":
        return rng.integers(0, 3, shape)
    x = rng.standard_normal(shape)
    if scale:
        x = 1 + 0.3 * x if len(shape) < 2 else x / max(1, shape[-1]) ** 0.5
    return np.asarray(x, np.float32)


@dataclass(frozen=True)
class Index:
    """Integers below a bound: the product of sizes of another operand's axes, or an attribute's value.

    axes: axis numbers, or the name of the attribute that holds the axis. distinct: no index twice along the last axis.
    padding: some are -1, in exact drawings.
    """

    of: str
    axes: tuple[int | str, ...] = (0,)
    distinct: bool = False
    padding: bool = False

    def bound(self, shapes: Mapping[str, Shape], attrs: Mapping[str, Any]) -> int:
        """Return the exclusive upper bound, at least 1."""
        if self.of in attrs:
            return max(1, int(attrs[self.of]))
        axes = [int(attrs[a]) if isinstance(a, str) else a for a in self.axes]
        return max(1, int(np.prod([shapes[self.of][a] for a in axes])))

    def __call__(self, d: Drawing, shape: Shape) -> Array:
        """Draw indices."""
        bound = self.bound(d.shapes, d.attrs)
        if self.distinct and bound >= shape[-1]:
            return np.argsort(d.rng.random((*shape[:-1], bound)), -1)[..., : shape[-1]]
        low = -1 if self.padding and d.exact else 0
        return d.rng.integers(low, bound, shape)


def index(of: str, *axes: int | str, distinct: bool = False, padding: bool = False) -> Index:
    """Declare indices into the operand `of` along `axes` (the first if none is named), or below the attribute `of`."""
    return Index(of, axes or (0,), distinct, padding)


def integers(low: int, high: int) -> Content:
    """Declare integers from `low` to below `high`."""
    return lambda d, shape: d.rng.integers(low, high, shape)


def factor(name: str) -> Content:
    """Declare the factor `name` of a product: codes if it is of an integer dtype, else arbitrary numbers."""

    def draw(d: Drawing, shape: Shape) -> Array:
        if DTYPES[d.dtypes[name]].kind == "i":
            return np.clip(np.rint(32 * d.rng.standard_normal(shape)), -127, 127)
        return arbitrary(d.rng, shape, "f", d.scale)

    return draw


def rows(d: Drawing, shape: Shape) -> Array:
    """Return the device row of each entry."""
    return np.resize(d.step.rows, shape)


def qlens(d: Drawing, shape: Shape) -> Array:
    """Return the number of tokens of each entry."""
    return np.resize(d.step.qlens, shape)


def starts(d: Drawing, shape: Shape) -> Array:
    """Return the offset of each entry's first token, and the total."""
    return np.resize(d.step.starts, shape)


def token_row(d: Drawing, shape: Shape) -> Array:
    """Return the device row of each token."""
    return d.step.per_token(d.step.token_row, shape)


def positions(d: Drawing, shape: Shape) -> Array:
    """Return the position of each token in its sequence."""
    return d.step.per_token(d.step.positions, shape)


def length(d: Drawing, shape: Shape) -> Array:
    """Return the number of computed tokens of each device row."""
    return np.resize(d.step.before, shape)


def row_numbers(d: Drawing, shape: Shape) -> Array:
    """Return arbitrary numbers of each device row."""
    return arbitrary(d.rng, shape, "f", d.scale)


def page_table(d: Drawing, shape: Shape) -> Array:
    """Return the KV pages of each device row; rows share pages only if there are fewer pages than entries."""
    return np.resize(d.rng.permutation(d.step.pages), shape)


def kv_pool(d: Drawing, shape: Shape) -> Array:
    """Return keys and values, or other rows, of all pages."""
    return arbitrary(d.rng, shape, "f", d.scale)


def slots(d: Drawing, shape: Shape) -> Array:
    """Return distinct KV slots of the tokens, -1 for padding."""
    drawn = d.rng.permutation(max(d.step.pages * d.step.page, shape[0]))[: shape[0]]
    return np.where(positions(d, shape) < 0, -1, drawn)


def token_ids(d: Drawing, shape: Shape) -> Array:
    """Return ids of the vocabulary, such as a row's history."""
    return d.rng.integers(0, d.vocabulary, shape)


def history(d: Drawing, shape: Shape) -> Array:
    """Return the token ids of each device row."""
    return token_ids(d, shape)


def emit(d: Drawing, shape: Shape) -> Array:
    """Whether an entry emits its id; about three quarters do."""
    return np.ones(shape) if d.step.greedy else d.rng.random(shape) < 0.75


def logits(d: Drawing, shape: Shape) -> Array:
    """Return logits of the vocabulary, with a standard deviation of 3."""
    return 3 * d.rng.standard_normal(shape)


def counts(d: Drawing, shape: Shape) -> Array:
    """Return the number of times that each id was sampled: 0 to 2."""
    return np.zeros(shape) if d.step.greedy else d.rng.integers(0, 3, shape)


def seen(d: Drawing, shape: Shape) -> Array:
    """Return a bitmap of the ids of the prompt."""
    return np.zeros(shape) if d.step.greedy else d.rng.integers(-(2**31), 2**31, shape)


def allowed(d: Drawing, shape: Shape) -> Array:
    """Return bitmaps of allowed ids, among them every third."""
    return np.full(shape, -1) if d.step.greedy else d.rng.integers(-(2**31), 2**31, shape) | EVERY_THIRD


def stops(d: Drawing, shape: Shape) -> Array:
    """Return the stop ids of each device row, -1 for none: up to two, none of which is a third id (see `allowed`)."""
    out = np.full(shape, -1)
    few = np.arange(1, d.vocabulary, 3)
    if not d.step.greedy and len(few):
        out[:, :2] = d.rng.choice(few, out[:, :2].shape)
    return out


def bias_ids(d: Drawing, shape: Shape) -> Array:
    """Return ids with a bias, of which the first `num_biases` are ascending."""
    if d.step.greedy or d.vocabulary < shape[1]:
        return np.resize(np.arange(d.vocabulary), (shape[1],))[None].repeat(shape[0], 0)
    return np.sort(np.argsort(d.rng.random((shape[0], d.vocabulary)), 1)[:, : shape[1]], 1)


def biases(d: Drawing, shape: Shape) -> Array:
    """Return the biases of those ids."""
    return 4 * d.rng.standard_normal(shape)


def _columns(shape: Shape, names: tuple[str, ...], values: Mapping[str, Any]) -> Array:
    """Return parameters of device rows: every parameter is off except for the named columns."""
    out = np.zeros(shape)
    for at, name in enumerate(names):
        out[:, at] = values.get(name, OFF.get(name, 0))
    return out


def fparams(d: Drawing, shape: Shape) -> Array:
    """Return the float sampling parameters of each device row."""
    if d.step.greedy:
        return _columns(shape, FLOAT_COLUMNS, {})
    n, choice = shape[0], d.rng.choice
    values = {
        "temperature": choice([0.0, 0.5, 1.5], n), "top_p": choice([1.0, 0.8], n), "min_p": choice([0.0, 0.05], n),
        "repetition_penalty": choice([1.0, 1.7], n), "presence_penalty": d.rng.uniform(-1, 1, n),
        "frequency_penalty": d.rng.uniform(-1, 1, n),
    }  # fmt: skip
    return _columns(shape, FLOAT_COLUMNS, values)


def iparams(d: Drawing, shape: Shape) -> Array:
    """Return the integer sampling parameters of each device row."""
    if d.step.greedy:
        return _columns(shape, INT_COLUMNS, {})
    n, integers = shape[0], d.rng.integers
    values = {
        "top_k": d.rng.choice([0, 5], n), "seed_lo": integers(-(2**31), 2**31, n),
        "seed_hi": integers(-(2**31), 2**31, n), "prompt_len": d.rng.choice([0, 2, 6], n),
        "min_len": integers(2, 12, n), "want_logprobs": integers(0, 2, n),
        "num_biases": integers(0, 1 + min(3, d.vocabulary), n), "masked": integers(0, 4, n),
    }  # fmt: skip
    return _columns(shape, INT_COLUMNS, values)


def drafts(d: Drawing, shape: Shape) -> Array:
    """Return the number of drafted tokens of each device row, and the lengths of the suffixes that are searched for."""
    if d.step.greedy:
        return _columns(shape, DRAFT_COLUMNS, {"max_drafts": 4, "min_ngram": 1, "max_ngram": 3})
    n, integers = shape[0], d.rng.integers
    low = integers(1, 3, n)
    values = {
        "num_drafts": integers(0, 4, n), "max_drafts": integers(0, 6, n), "min_ngram": low,
        "max_ngram": low + integers(0, 3, n),
    }  # fmt: skip
    return _columns(shape, DRAFT_COLUMNS, values)


def positive(d: Drawing, shape: Shape) -> Array:
    """Return numbers from 0.1 to 3."""
    return d.rng.uniform(0.1, 3, shape)


def probability(d: Drawing, shape: Shape) -> Array:
    """Return numbers from 0 to 1."""
    return d.rng.random(shape)


def _angle(d: Drawing, shape: Shape) -> Array:
    return np.asarray(d.shared("angle", lambda: d.rng.uniform(0, 6, shape)))


def cosine(d: Drawing, shape: Shape) -> Array:
    """Return the cosines of the angles whose sines are the operand that holds `sine`."""
    return np.cos(_angle(d, shape))


def sine(d: Drawing, shape: Shape) -> Array:
    """Return the sines of the angles whose cosines are the operand that holds `cosine`."""
    return np.sin(_angle(d, shape))
