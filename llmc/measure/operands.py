"""Plausible integer operands for a node that runs alone: the rows, positions and pages of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from llmc.ir.dtype import DTYPES
from llmc.ir.graph import Node, Value

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """A step of `rows` rows with `tokens` tokens in total, over `pages` KV pages of `page` tokens.

    The last row holds the next tokens of a prompt, all others one token. Every row ends at position `context`, or later
    if it has more tokens. Indices are below `bound`.
    """

    rows: int
    tokens: int
    context: int
    pages: int
    page: int
    bound: int

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row."""
        ones = np.ones(max(1, self.rows), np.int64)
        ones[-1] = max(1, self.tokens - len(ones) + 1)
        return ones

    @property
    def befores(self) -> np.ndarray:
        """Tokens of each row before this step."""
        return np.maximum(self.context - self.lengths, 0)

    @property
    def starts(self) -> np.ndarray:
        """Offset of each row's first token, and the total."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


def _token_row(s: Scene, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    return np.repeat(np.arange(len(s.lengths)), s.lengths) if shape[0] == s.tokens else np.arange(shape[0])


def _positions(s: Scene, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    row = _token_row(s, shape, rng)
    return s.befores[row] + (np.arange(shape[0]) - s.starts[row] if shape[0] == s.tokens else 0)


def _pages(s: Scene, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    count = int(np.prod(shape))
    order = rng.permutation(s.pages)
    return order[np.arange(count) % s.pages].reshape(shape)


Maker = Callable[[Scene, Shape, np.random.Generator], np.ndarray]
# Operand name -> how to make it, for every op with an operand of that name.
MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "rows": lambda s, shape, rng: np.arange(shape[0]),
        "qlens": lambda s, shape, rng: s.lengths[: shape[0]],
        "starts": lambda s, shape, rng: s.starts[: shape[0]],
        "token_row": _token_row,
        "positions": _positions,
        "pos": _positions,
        "slots": lambda s, shape, rng: rng.permutation(s.pages * s.page)[: shape[0]],
        "pages": _pages,
        "length": lambda s, shape, rng: np.resize(s.befores, shape),
        "tokens": lambda s, shape, rng: rng.integers(0, s.bound, shape),
        "idx": lambda s, shape, rng: rng.integers(0, s.bound, shape),
        "ids": lambda s, shape, rng: np.broadcast_to(np.arange(shape[-1]) % s.bound, shape),
        "emit": lambda s, shape, rng: np.ones(shape),
        "stops": lambda s, shape, rng: np.full(shape, -1),
        "bias_ids": lambda s, shape, rng: np.zeros(shape),
        "allowed": lambda s, shape, rng: np.full(shape, -1),
        "seen": lambda s, shape, rng: np.zeros(shape),
        "counts": lambda s, shape, rng: np.zeros(shape),
        "iparams": lambda s, shape, rng: np.zeros(shape),
        "fparams": lambda s, shape, rng: np.zeros(shape),
    }
)


def unknown_operand(n: Node) -> str | None:
    """Return the name of the first integer operand that MAKERS lacks, or None."""
    for name, v in named(n):
        if DTYPES[v.type.dtype].kind == "i" and name not in MAKERS:
            return name
    return None


def named(n: Node) -> list[tuple[str, Value]]:
    """Return (name in the op's declaration, value) per operand; the last name repeats for variadic ops."""
    names = [s.name for s in n.op.operands]
    return [(names[min(i, len(names) - 1)], v) for i, v in enumerate(n.operands)]


def values(name: str, dtype: str, shape: Shape, scene: Scene, rng: np.random.Generator) -> np.ndarray | None:
    """Return an operand's values in its dtype, or None for floats, which may be arbitrary."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.uint8)
    if name not in MAKERS or (DTYPES[dtype].kind == "f" and name != "fparams"):
        return None
    return MAKERS[name](scene, shape, rng).astype(DTYPES[dtype].np)


def noise(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return `size` bytes that are moderate numbers in bf16, f16 and f32: normally distributed bfloat16 values."""
    bits = rng.standard_normal(size // 2, np.float32).view(np.uint32)
    return np.ascontiguousarray((bits >> 16).astype(np.uint16)).view(np.uint8)


def bound_of(n: Node, env: Mapping[str, int]) -> int:
    """Return the exclusive upper bound of indices into the node's first operand."""
    shape = n.operands[0].type.shape if n.operands else ()
    return max(1, int(shape[0].subs(env).const or 1)) if shape else 1
