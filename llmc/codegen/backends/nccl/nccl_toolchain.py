"""The toolchain of the language "nccl", whose sources are what the runtime reads: nothing is compiled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from llmc_runtime.format.nccl_call import ABI

from llmc.codegen.kernel import Source
from llmc.codegen.toolchain import Compiled, Output, Progress
from llmc.targets.target import Target

_DIGITS = 32


class NcclToolchain:
    """Makes the descriptions of calls; see Toolchain."""

    name = "nccl calls"
    version = ABI.rpartition("-")[2]
    output = Output("txt", "json", ABI)

    @classmethod
    def find(cls, target: Target) -> NcclToolchain:
        """Return the toolchain, which needs no compiler."""
        return cls()

    def key(self, source: Source) -> str:
        """Return a hash of the description."""
        return hashlib.sha256(f"{ABI} {source.text}".encode()).hexdigest()[:_DIGITS]

    def cached(self, key: str, cache: Path) -> bool:
        """Return True: nothing has to be compiled."""
        return True

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """Return the descriptions by key."""
        return {self.key(source): Compiled(source.text.encode()) for source, _ in sources}
