"""A language of another package, first of two files: a toolchain for C, which runs the compiler `cc`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmc.extend import Compiled, Diagnostic, Output, Source, Target

FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared")


@dataclass(frozen=True)
class CToolchain:
    """The language "c", for CPUs."""

    compiler: str
    version: str
    name = "cc"
    output = Output("c", "so", "cpu-1")

    @staticmethod
    def find(target: Target) -> CToolchain:
        """Return the compiler on PATH; raises Diagnostic E501 if there is none."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise Diagnostic("E501", "no C compiler on PATH (cc)", "install one, for example: apt-get install gcc")
        version = subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=True)
        return CToolchain(compiler, version.stdout.strip())

    def key(self, source: Source) -> str:
        """Return a hash of text, flags and version."""
        return hashlib.sha256("\0".join((source.text, *FLAGS, self.version)).encode()).hexdigest()[:32]

    def cached(self, key: str, cache: Path) -> bool:
        """Whether the cache has the binary."""
        return (cache / f"{key}.so").is_file()

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> dict[str, Compiled]:  # fmt: skip
        """Compile the sources one after the other."""
        out: dict[str, Compiled] = {}
        cache.mkdir(parents=True, exist_ok=True)
        for source, loc in sources:
            key = self.key(source)
            if not self.cached(key, cache):
                self._run(source, loc, cache / f"{key}.so")
            out[key] = Compiled((cache / f"{key}.so").read_bytes())
            if progress:
                progress(len(out), len(sources), source.entry)
        return out

    def _run(self, source: Source, loc: str, binary: Path) -> None:
        """Write the binary of a source; it appears under its name only when it is complete."""
        with tempfile.TemporaryDirectory(dir=binary.parent, prefix="build-") as folder:
            text, built = Path(folder, "kernel.c"), Path(folder, "kernel.so")
            text.write_text(source.text)
            run = subprocess.run([self.compiler, *FLAGS, text, "-o", built], capture_output=True, text=True)
            if run.returncode:
                raise Diagnostic("E502", f"cc could not compile {source.entry}: {run.stderr}", "correct it", loc=loc)
            built.rename(binary)
