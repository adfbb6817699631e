"""The toolchain of the language "cpp": C++ text to shared objects, through a content-addressed cache."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from llmc.codegen.backends.cpp.step_unit import step_source
from llmc.codegen.kernel import Source
from llmc.codegen.toolchain import Compiled, Output, Progress, compile_error, compile_in_threads
from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast", "-Wno-psabi", "-pthread", "-s", "-Wl,--as-needed",
    "-Wl,--build-id=none", "-static-libgcc",
)  # fmt: skip
_DIGEST = 32
# The system headers of kernels, precompiled: parsing immintrin.h takes longer than compiling most kernels.
HEADERS = ("immintrin.h", "math.h", "stdint.h", "string.h")
SLOW_INCLUDE = "#include <immintrin.h>"  # kernels without it compile as fast without precompiled headers
MIN_KERNELS = 6  # kernels; precompiling takes as long as parsing the headers this often
_HEADERS_TEXT = "".join(f"#include <{name}>\n" for name in HEADERS)


@dataclass(frozen=True)
class CppToolchain:
    """A C++ compiler for one target. Equal text, flags and compiler version give the same key, and one compilation.

    The only option of a source is ("O", level), which replaces the optimisation level.
    """

    compiler: str
    version: str
    flags: tuple[str, ...]
    output = Output("cpp", "so", "cpu-1", step_source)

    @staticmethod
    def find(target: Target, names: Sequence[str] = COMPILERS, path: str | None = None) -> CppToolchain:
        """Return the first compiler of `names` on `path` (default: PATH); raises Diagnostic E501 if none exists."""
        for name in names:
            if exe := shutil.which(name, path=path):
                return CppToolchain(exe, _version(exe), (*FLAGS, *target.flags))
        raise Diagnostic(
            "E501",
            f"no C++ compiler on PATH ({', '.join(names)}); compiling for {target.name} needs one",
            "install one, for example: apt-get install g++ (not needed to run an artifact)",
        )

    @property
    def name(self) -> str:
        """The compiler's file name, such as "g++"."""
        return Path(self.compiler).name

    def key(self, source: Source) -> str:
        """Return a hash of text, flags and compiler: 32 hexadecimal digits."""
        parts = [source.text, *self.flags, *_extra(source), self.name, self.version]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGEST]

    def cached(self, key: str, cache: Path) -> bool:
        """Whether the cache has an entry for the key."""
        return (cache / f"{key}.so").is_file()

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """Compile pairs (source, location) with up to `jobs` compilers at a time; return key -> shared object.

        Raises Diagnostic E502 with the first error of the first source that does not compile.
        """
        headers = self._headers(sources, cache)

        def compile_one(key: str, source: Source, loc: str) -> Compiled:
            return Compiled(self._binary(key, source, loc, cache, headers), source.threads, source.shared)

        return compile_in_threads(sources, self.key, compile_one, cache, jobs, progress)

    def _headers(self, sources: Sequence[tuple[Source, str]], cache: Path) -> Path | None:
        """Return the precompiled headers for those sources that have to be compiled, as `precompiled` does."""
        slow = {self.key(s) for s, _ in sources if SLOW_INCLUDE in s.text}
        missing = sum(not self.cached(key, cache) for key in slow)
        if not missing or self.name != "g++":
            return None
        cache.mkdir(parents=True, exist_ok=True)
        return precompiled([self.compiler, *self.flags], self.version, cache.resolve(), missing)

    def _binary(self, key: str, source: Source, loc: str, cache: Path, headers: Path | None) -> bytes:
        entry = cache / f"{key}.so"
        if (binary := _read_entry(entry)) is not None:
            return binary
        with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as tmp:
            text, target = Path(tmp, "kernel.cpp"), Path(tmp, "kernel.so")
            text.write_text(source.text)
            first = ["-include", str(headers)] if headers and SLOW_INCLUDE in source.text else []
            argv = [self.compiler, *self.flags, *_extra(source), *first, text.name, "-o", target.name, "-lm"]
            r = subprocess.run(argv, cwd=tmp, capture_output=True, text=True)
            if r.returncode:
                raise self._failed(r.stderr, r.returncode, source, loc, cache / f"{key}.failed.cpp")
            binary = target.read_bytes()
            _write_entry(entry, binary, Path(tmp, "entry"))
        return binary

    def _failed(self, stderr: str, code: int, source: Source, loc: str, saved: Path) -> Diagnostic:
        first = next((s for s in stderr.splitlines() if re.search(r"\b(fatal )?error\b", s)), "")
        message = first or (stderr.strip().splitlines() or [f"exit status {code}"])[0]
        return compile_error(f"{self.name} {self.version}", source, message, saved, loc, stderr)


def _extra(source: Source) -> list[str]:
    """Return the compiler's arguments for the options of a source."""
    return [f"-{name}{value}" for name, value in source.options]


def _read_entry(path: Path) -> bytes | None:
    """Return the binary of a cache entry (the binary, then its sha256); None if absent, truncated or modified."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    binary, digest = data[:-_DIGEST], data[-_DIGEST:]
    return binary if len(data) > _DIGEST and hashlib.sha256(binary).digest() == digest else None


def _write_entry(path: Path, binary: bytes, tmp: Path) -> None:
    tmp.write_bytes(binary + hashlib.sha256(binary).digest())
    os.replace(tmp, path)


@lru_cache(maxsize=8)
def _version(compiler: str) -> str:
    r = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True)
    machine = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True)
    return f"{r.stdout.strip()} {machine.stdout.strip()}"


def precompiled(command: Sequence[str], version: str, cache: Path, kernels: int) -> Path | None:
    """Return the header that kernels include first (-include), in `cache`; GCC finds its precompiled form next to it.

    command: the compiler and its flags. version: the compiler's. kernels: how many kernels are to be compiled. None if
    there is no precompiled form and too few kernels to make one, or if it cannot be made; kernels compile without it,
    to the same binaries. GCC ignores a form that other flags or another compiler made.
    """
    digest = hashlib.sha256("\0".join([_HEADERS_TEXT, version, *command[1:]]).encode()).hexdigest()[:_DIGEST]
    header = cache / f"headers-{digest}" / "headers.h"
    if header.is_file():
        return header
    if kernels < MIN_KERNELS:
        return None
    with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as tmp:
        folder = Path(tmp, "made")
        folder.mkdir()
        (folder / header.name).write_text(_HEADERS_TEXT)
        argv = [*command, "-c", "-x", "c++-header", header.name, "-o", f"{header.name}.gch"]
        if subprocess.run(argv, cwd=folder, capture_output=True).returncode:
            return None
        try:
            os.rename(folder, header.parent)
        except OSError:  # another process has made it meanwhile
            pass
    return header if header.is_file() else None
