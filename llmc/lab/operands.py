"""Integers that make sense to a node that runs alone: rows, positions, pages of a plausible step; floats are noise."""

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
    """A step of `rows` rows with `tokens` tokens in all, over `pages` KV pages of `page` tokens: the last row has a
    prompt's next tokens, the others one each, and each row ends at token `context`, or later where it has more.
    `bound`: what indices stay below."""

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
# What an operand of this name holds, in every op that has one.
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
    """The first integer operand of a node for which there are no values, or None."""
    for name, v in named(n):
        if DTYPES[v.type.dtype].kind == "i" and name not in MAKERS:
            return name
    return None


def named(n: Node) -> list[tuple[str, Value]]:
    """(name in the op's declaration, value) of each operand; the last name stands for all that follow."""
    names = [s.name for s in n.op.operands]
    return [(names[min(i, len(names) - 1)], v) for i, v in enumerate(n.operands)]


def values(name: str, dtype: str, shape: Shape, scene: Scene, rng: np.random.Generator) -> np.ndarray | None:
    """The operand's values in their dtype; None for floats that any numbers will do for."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(np.uint8)
    if name not in MAKERS or (DTYPES[dtype].kind == "f" and name != "fparams"):
        return None
    return MAKERS[name](scene, shape, rng).astype(DTYPES[dtype].np)


def noise(size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` bytes that are moderate numbers in bf16, in f16 and in f32: normal values, bfloat16 bits."""
    bits = rng.standard_normal(size // 2, np.float32).view(np.uint32)
    return np.ascontiguousarray((bits >> 16).astype(np.uint16)).view(np.uint8)


def bound_of(n: Node, env: Mapping[str, int]) -> int:
    """What indices into the node's first operand must stay below."""
    shape = n.operands[0].type.shape if n.operands else ()
    return max(1, int(shape[0].subs(env).const or 1)) if shape else 1
