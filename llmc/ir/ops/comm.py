"""Collectives: ops between the ranks of a group, which all run the same graph with their own parts of the weights.

A reference takes one array per rank, in the ranks' order, and gives the result that every rank then has. The
interpreter of all ranks is `llmc.check.compare_outputs.run_ranks`; that of one rank can evaluate a collective of one
rank only. `bytes` are those that a rank sends and receives over its link.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from llmc.ir.opdef import op
from llmc.ir.ops import norm
from llmc.ir.ops.common import axis_of
from llmc.ir.signature import Mismatch
from llmc.ir.types import Type


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise Mismatch(f"ranks = {ranks} must be at least 1")


def _of_all(xs: tuple[Any, ...], ranks: int) -> tuple[Any, ...]:
    if len(xs) != ranks:
        raise ValueError(f"a collective of {ranks} ranks got arrays of {len(xs)}; interpret all ranks with run_ranks")
    return xs


def _reduce_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    _check_ranks(attrs["ranks"])
    return [env["x"]]


@op(
    "(x: f[*s]) -> x[*s]", infer=_reduce_type, flops="ranks*s", bytes="2*ranks*s*bytes_x - 2*s*bytes_x",
    example={"*s": (2, 3), "ranks": 1},
)  # fmt: skip
def all_reduce(*xs: Any, ranks: int) -> Any:
    """The sum of every rank's x, in the ranks' order, on every rank.

    The cost is that of each rank sending x to all others.
    """
    first, *others = _of_all(xs, ranks)
    return sum(others, first)


def _add_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    if env["r"] != env["x"]:
        raise Mismatch(f"r is {env['r']}, x is {env['x']}")
    return _reduce_type(env, attrs)


@op(
    "(x: f[*s], r: f[*s]) -> x[*s]", infer=_add_type, flops="ranks*s + s", bytes="2*ranks*s*bytes_x - 2*s*bytes_x",
    example={"*s": (2, 3), "ranks": 1},
)  # fmt: skip
def all_reduce_add(*xs: Any, ranks: int) -> Any:
    """The sum of every rank's x plus r, which all ranks have; rounded once. The last argument is r."""
    *terms, r = xs
    first, *others = _of_all(tuple(terms), ranks)
    return sum(others, first) + r


def _norm_types(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    x, w = env["x"], env["w"]
    if x.shape[-1:] != w.shape:
        raise Mismatch(f"w is {w}, not a vector of the last axis of {x}")
    return (_add_type if "r" in env else _reduce_type)(env, attrs) * 2


@op(
    "(x: f[*s], w: f[d], r?: f[*s]) -> (total: x[*s], normed: x[*s])", infer=_norm_types,
    flops="ranks*s + 5*s", bytes="2*ranks*s*bytes_x - 2*s*bytes_x",
    example={"*s": (3, 8), "d": 8, "ranks": 1, "eps": 1e-5},
)  # fmt: skip
def all_reduce_norm(*xs: Any, eps: float, ranks: int) -> Any:
    """The sum of every rank's x, plus r if there is one, and the rms_norm of this sum with the gain w.

    All ranks have the same w and r, which follow the ranks' x among the arguments.
    """
    terms, (w, *residual) = xs[:ranks], xs[ranks:]
    first, *others = _of_all(terms, ranks)
    total = sum([*others, *residual], first)
    return total, norm.rms_norm.ref(total, w, eps=eps)


def _gather_type(env: dict[str, Any], attrs: Mapping[str, Any]) -> list[Type]:
    _check_ranks(attrs["ranks"])
    x = env["x"]
    a = axis_of(x.rank, attrs["axis"])
    return [x.with_shape(*x.shape[:a], x.shape[a] * attrs["ranks"], *x.shape[a + 1 :])]


@op(
    "(x: t[*s]) -> x[...]", infer=_gather_type, bytes="2*ranks*s*bytes_x - 2*s*bytes_x",
    example={"*s": (2, 3), "axis": 1, "ranks": 1},
)  # fmt: skip
def all_gather(*xs: Any, axis: int, ranks: int) -> Any:
    """Every rank's x, concatenated along one axis in the ranks' order, on every rank."""
    return np.concatenate(_of_all(xs, ranks), axis)


COLLECTIVES = frozenset(o.name for o in (all_reduce, all_reduce_add, all_reduce_norm, all_gather))
