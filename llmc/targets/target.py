"""What a machine is, as one frozen record; it holds no code and detects nothing (see the records beside it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes that kernels may rely on: threads of a pool, bytes of one core's caches; of a GPU its `units`
    (multiprocessors), the bytes of shared memory that one block can have, the threads of a warp."""

    threads: int = 1
    l1: int = 32 << 10
    l2: int = 1 << 20
    units: int = 0
    shared: int = 0
    warp: int = 32


@dataclass(frozen=True)
class Target:
    """One machine to compile for.

    `features` are exactly the instruction-set features a binary may use (of CPUs by the names of /proc/cpuinfo); a
    loader checks them. `peaks` are flop/s by dtype and `bandwidth` byte/s, for the cost rule alone. `pipeline` is the
    text of the pass pipeline. `languages` are those of kernels that its device can run, the usual one first.
    `kv_layout` is the shape of one layer's pages, `page_size` the tokens of a page, `vector` the width of a vector
    register in bytes. `flags` are what the C++ compiler is told about the machine. `rows` and `tokens` of a step are
    what an artifact allows when nobody says otherwise. `memory`: bytes of the smallest device of the kind that is
    common, for plans alone; 0 where that is not known.
    """

    name: str
    family: str
    arch: str
    features: frozenset[str]
    limits: Limits
    peaks: Mapping[str, float]
    bandwidth: float
    languages: tuple[str, ...]
    pipeline: str
    kv_layout: str = "P,2,H,page,D"
    page_size: int = 16
    vector: int = 16
    flags: tuple[str, ...] = ()
    launch_us: float = 1.0
    rows: int = 16
    tokens: int = 512
    memory: int = 0

    def has(self, *features: str) -> bool:
        """True where binaries for this target may use all the named features."""
        return self.features.issuperset(features)
