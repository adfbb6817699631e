"""The packed layout of every weight: one that all of its users support, in all entry points."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from llmc.codegen.candidates import Candidate
from llmc.ir.graph import Node, Value
from llmc.targets.target import Target

Layouts = tuple[tuple[str, str], ...]  # (weight, its packed layout), sorted


def common_layouts(
    ranked: Sequence[tuple[Node, list[Candidate]]], prefer: Collection[str], target: Target
) -> dict[str, str]:
    """Return the layout of each weight that kernels would pack differently.

    Of the layouts that every user of a weight supports, it is the one with the smallest mean time of its users, each
    relative to the user's best candidate.
    """
    users: dict[frozenset[str], list[dict[Layouts, float]]] = {}  # by the weights that the user reads
    for n, candidates_of in ranked:
        times = _times_by_layouts(n, candidates_of, prefer, target)
        weights = frozenset(weight for layouts in times for weight, _ in layouts)
        if weights:
            users.setdefault(weights, []).append(times)
    agreed: dict[str, str] = {}
    for times_of_users in users.values():
        agreed.update(_fastest_layouts(times_of_users))
    return agreed


def _times_by_layouts(
    n: Node, candidates_of: list[Candidate], prefer: Collection[str], target: Target
) -> dict[Layouts, float]:
    """Return the time of the best candidate for each choice of layouts, relative to the best candidate of all.

    Candidates without packed weights have the empty choice. If there are kernels of `prefer`, only these count.
    """
    times: dict[Layouts, float] = {}
    for c in [c for c in candidates_of if c.kernel.name in prefer] or candidates_of:
        layouts = tuple(sorted((_origin(n.operands[i]), text) for i, text in c.layouts(n, target).items()))
        times.setdefault(layouts, c.us / max(candidates_of[0].us, 1e-9))
    return times


def _fastest_layouts(times_of_users: Sequence[Mapping[Layouts, float]]) -> Layouts:
    """Return the layouts that all users support with the smallest sum of times; () if there are none."""
    supported = [layouts for layouts in times_of_users[0] if all(layouts in times for times in times_of_users)]
    return min(supported, key=lambda layouts: sum(times[layouts] for times in times_of_users), default=())


def agreeing(n: Node, ranked: list[Candidate], agreed: dict[str, str], target: Target) -> Candidate:
    """Return the best candidate whose layouts match those of earlier users of the same weights, and record its layouts.

    `agreed` maps weights to their layouts.
    """
    for o in ranked:
        layouts = {_origin(n.operands[i]): text for i, text in o.layouts(n, target).items()}
        if all(agreed.setdefault(w, text) == text for w, text in layouts.items()):
            return o
    return ranked[0]


def _origin(v: Value) -> str:
    """Return a weight's identity across entry points: its name, or the expression that computes it from weights."""
    if v.node is None:
        return v.name
    inner = ",".join(_origin(x) for x in v.node.operands)
    return f"{v.node.op.name}({inner}){sorted((k, str(a)) for k, a in v.node.attrs.items())}"
