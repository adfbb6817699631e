"""The toolchain of the language "cute": CuTe DSL texts to cubins, each in a process of its own and without a GPU."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from llmc_runtime.format.install_command import install_command

from llmc.codegen.cubin import check_launch
from llmc.codegen.kernel import Source
from llmc.codegen.kernel_cache import entry_path, read_entry, write_entry
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.toolchain import Compiled, Output, Progress, compile_error, compile_in_threads
from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

# The packages that kernels are compiled with. Kernels change parts of them that are not public: other versions are
# refused. pyproject.toml declares the same versions in the extra `flash`.
PACKAGES: Mapping[str, str] = MappingProxyType(
    {"nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5", "flash-attn-4": "4.0.0b36"}
)
VERSION = " ".join(f"{name} {found}" for name, found in PACKAGES.items())
WORKER = "llmc.codegen.backends.cute.compile_worker"
_DIGEST = 32
_KILLED = -9  # the status of a process that the kernel ended for lack of memory


@dataclass(frozen=True)
class CuteToolchain:
    """The CuTe DSL for one target. Equal text, launch and versions give the same key, and one compilation."""

    target: Target
    version: str = VERSION
    name = "cute"
    output = Output("cute.py", "cubin", "cuda-1")

    @staticmethod
    def find(target: Target) -> CuteToolchain:
        """Return the toolchain of `target`; raises Diagnostic E501 if packages are missing or have other versions."""
        if why := missing():
            raise Diagnostic("E501", f"a kernel for {target.name} is written in the CuTe DSL, but {why}", remedy())
        return CuteToolchain(target)

    def key(self, source: Source) -> str:
        """Return a hash of text, launch, architecture and versions: 32 hexadecimal digits."""
        maps = [(m.param, len(m.shape), m.box, m.swizzle) for m in source.maps]
        passes = [(p.kind, p.index, p.nbytes) for p in source.passes]
        what = [source.text, source.entry, passes, maps, source.threads, source.shared, self.target.arch, self.version]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGEST]

    def cached(self, key: str, cache: Path) -> bool:
        """Whether the cache has an entry for the key."""
        return entry_path(cache, key).is_file()

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """Compile pairs (source, location) in up to `jobs` processes; return key -> cubin.

        Raises Diagnostic E502 if a source does not compile, E503 if its process was killed, and E505 if a binary's
        parameters differ from those that its launches pass.
        """

        def compile_one(key: str, source: Source, loc: str) -> Compiled:
            return self._compiled(key, source, loc, cache)

        return compile_in_threads(sources, self.key, compile_one, cache, jobs, progress)

    def _compiled(self, key: str, source: Source, loc: str, cache: Path) -> Compiled:
        path = entry_path(cache, key)
        if (entry := read_entry(path)) is not None:
            return entry
        binary, message = compile_text(source, self.target.arch)
        if message:
            lines = [line.strip() for line in message.splitlines() if line.strip()]
            raise compile_error(
                f"CuTe DSL ({self.version})", source, lines[-1], cache / f"{key}.failed.py", loc, message
            )
        check_launch(source, binary, loc)
        boxes = tuple((m.box, m.swizzle) for m in source.maps)
        compiled = Compiled(binary, source.threads, source.shared, boxes)
        write_entry(path, compiled)
        return compiled


def compile_text(source: Source, arch: str) -> tuple[bytes, str]:
    """Return (cubin, ""), or (b"", the messages) if the text does not compile; raises Diagnostic E503 if the process
    was killed.
    """
    with scratch() as folder:
        text, out = folder / "kernel.py", folder / "kernel.cubin"
        text.write_text(source.text)
        # The DSL reads its architecture from the environment of its process.
        command = ["env", f"CUTE_DSL_ARCH={arch}a", sys.executable, "-m", WORKER, str(text), str(out), source.entry]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode == _KILLED:
            cause = "a process of the CuTe compiler was killed; it needs about 400 MB of memory"
            raise Diagnostic("E503", cause, "free memory and try again")
        if done.returncode:
            return b"", (done.stderr or done.stdout).strip() or f"the process ended with status {done.returncode}"
        return out.read_bytes(), ""


def missing() -> str:
    """Return which package is not installed or has a version that is not supported, or ""."""
    for name, supported in PACKAGES.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            return f"{name} is not installed"
        if found != supported:
            return f"{name} {found} is installed, and only {supported} is supported"
    return ""


def remedy() -> str:
    """Return the text that says how to install the packages."""
    return f"{install_command('flash')} (no GPU is needed to compile)"
