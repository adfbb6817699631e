"""From C++ text to shared objects, through a content-addressed cache; it knows nothing of graphs or kernels."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

Progress = Callable[[int, int, str], None]  # done, of, what

COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast", "-Wno-psabi", "-pthread", "-s", "-Wl,--as-needed",
    "-Wl,--build-id=none", "-static-libgcc",
)  # fmt: skip
_DIGEST = 32
_STALE = 3600.0


@dataclass(frozen=True)
class Unit:
    """One C++ text to compile; `name` and `loc` say whose it is in messages. `extra` flags come last."""

    text: str
    name: str = "kernel"
    loc: str = ""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class CppToolchain:
    """A C++ compiler for one target. Equal text, flags and compiler version give the same key, and one compilation."""

    compiler: str
    version: str
    flags: tuple[str, ...]

    @staticmethod
    def find(target: Target, names: Sequence[str] = COMPILERS, path: str | None = None) -> CppToolchain:
        """The first compiler of `names` found on `path` (default: PATH); a Diagnostic says what to install."""
        for name in names:
            if exe := shutil.which(name, path=path):
                return CppToolchain(exe, _version(exe), (*FLAGS, *target.flags))
        raise Diagnostic(
            "E501",
            f"no C++ compiler was found (looked for {', '.join(names)}); target {target.name} needs one to compile",
            "install one, for example: apt-get install g++   (running an artifact needs none)",
        )

    def key(self, unit: Unit) -> str:
        """What the binary is a function of, as 32 hexadecimal digits."""
        parts = [unit.text, *self.flags, *unit.extra, Path(self.compiler).name, self.version]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_DIGEST]

    def compile(
        self, units: Sequence[Unit], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, bytes]:
        """key -> shared object for every unit, `jobs` compilers at a time; a Diagnostic shows the first error."""
        todo = {self.key(u): u for u in units}
        out: dict[str, bytes] = {}
        done = 0
        cache.mkdir(parents=True, exist_ok=True)
        sweep(cache)
        with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
            futures = {k: pool.submit(self._one, k, u, cache) for k, u in todo.items()}
            try:
                for k, f in futures.items():
                    out[k] = f.result()
                    done += 1
                    if progress:
                        progress(done, len(todo), todo[k].name)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return out

    def _one(self, key: str, unit: Unit, cache: Path) -> bytes:
        entry = cache / f"{key}.so"
        if (binary := _read_entry(entry)) is not None:
            return binary
        with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as tmp:
            source, target = Path(tmp, "kernel.cpp"), Path(tmp, "kernel.so")
            source.write_text(unit.text)
            argv = [self.compiler, *self.flags, *unit.extra, source.name, "-o", target.name, "-lm"]
            r = subprocess.run(argv, cwd=tmp, capture_output=True, text=True)
            if r.returncode:
                raise self._failed(r.stderr, r.returncode, unit, key, cache)
            binary = target.read_bytes()
            _write_entry(entry, binary, Path(tmp, "entry"))
        return binary

    def _failed(self, stderr: str, code: int, unit: Unit, key: str, cache: Path) -> Diagnostic:
        kept = cache / f"{key}.failed.cpp"
        kept.write_text(unit.text)
        first = next((s for s in stderr.splitlines() if re.search(r"\b(fatal )?error\b", s)), "")
        why = first or (stderr.strip().splitlines() or [f"exit status {code}"])[0]
        return Diagnostic(
            "E502",
            f"{Path(self.compiler).name} {self.version} could not compile {unit.name}: {why}",
            f"the source is kept at {kept}; report it, or choose another target",
            loc=unit.loc,
        )


def sweep(cache: Path) -> None:
    """Remove the work folders of compiles that were killed: those that nobody touched for an hour."""
    for path in cache.glob("build-*"):
        try:
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # its owner has just finished
            continue


def _read_entry(path: Path) -> bytes | None:
    """A cache entry is the binary and its sha256; anything else (cut short, changed) counts as absent."""
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
