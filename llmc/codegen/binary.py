"""Compiled kernels as code generation returns them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmc.codegen.kernel import Box, Source
from llmc.codegen.launch_plan import Placed


@dataclass(frozen=True)
class Binary:
    """A compiled unit: key, source text, binary, entry point, and launch parameters.

    `abi` is the calling convention, `boxes` are the boxes of its tensor maps. `suffix` and `language` are the
    extensions of its two files. `license`: see Source.
    """

    hash: str
    source: str
    binary: bytes
    entry: str
    threads: int = 0
    shared: int = 0
    suffix: str = "so"
    language: str = "cpp"
    abi: str = "cpu-1"
    boxes: tuple[Box, ...] = ()
    license: str = ""


def unique_sources(placed: Sequence[Placed], key: Callable[[Source], str]) -> dict[str, tuple[Source, str]]:
    """Return the sources by key, each with the path of a module that uses it, or ""."""
    sources: dict[str, tuple[Source, str]] = {}
    for p in placed:
        for n, s in zip(p.emitted.nodes, p.emitted.sources):
            source, loc = sources.get(key(s), (s, ""))
            sources[key(s)] = source, loc or n.loc
    return sources
