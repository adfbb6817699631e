"""Compiled kernels as code generation returns them, with the places of the model that use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmc.codegen.kernel import Box, Source
from llmc.codegen.launch_plan import Placed


@dataclass(frozen=True)
class Binary:
    """A compiled unit: key, source text, binary, entry point, and launch parameters.

    `locs` are the module paths that use it, `abi` the calling convention, `boxes` the boxes of its tensor maps.
    `suffix` and `language` are the extensions of its two files. `license`: see Source.
    """

    hash: str
    source: str
    binary: bytes
    entry: str
    threads: int = 0
    shared: int = 0
    locs: tuple[str, ...] = ()
    suffix: str = "so"
    language: str = "cpp"
    abi: str = "cpu-1"
    boxes: tuple[Box, ...] = ()
    license: str = ""


def locations(placed: Sequence[Placed], key: Callable[[Source], str]) -> dict[str, tuple[Source, tuple[str, ...]]]:
    """Group the sources by key: key -> (source, all module paths that use it)."""
    locs: dict[str, dict[str, None]] = {}
    sources: dict[str, Source] = {}
    for p in placed:
        for n, s in zip(p.emitted.nodes, p.emitted.sources):
            k = key(s)
            sources[k] = s
            locs.setdefault(k, {})[n.loc] = None
    return {k: (s, tuple(filter(None, locs[k]))) for k, s in sources.items()}
