"""The toolchain of the language "cuda": CUDA C++ text to cubins by NVRTC, in this process and without a GPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc_runtime.format.install_command import install_command

from llmc.codegen.cubin import check_launch
from llmc.codegen.kernel import Source
from llmc.codegen.kernel_cache import entry_path, read_entry, write_entry
from llmc.codegen.toolchain import Compiled, Output, Progress, compile_error, compile_in_threads
from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

_DIGEST = 32
_FEATURES = 90  # compute capability x 10 from which the suffix "a" enables architecture-specific instructions


@dataclass(frozen=True)
class NvrtcToolchain:
    """NVRTC for one target. Equal text, launch and version give the same key, and one compilation.

    NVRTC gets no include path, so a source is self-contained and a key needs no hashes of headers. Sources have no
    options.
    """

    target: Target
    version: str
    name = "nvrtc"
    output = Output("cu", "cubin", "cuda-1")

    @staticmethod
    def find(target: Target) -> NvrtcToolchain:
        """Return the toolchain of `target`; raises Diagnostic E501 if NVRTC or its bindings are not installed."""
        try:
            from cuda.bindings import nvrtc

            status, major, minor = nvrtc.nvrtcVersion()
        except (ImportError, RuntimeError, OSError):
            cause = f"a kernel for {target.name} is written in CUDA C++, but NVRTC is not installed"
            raise Diagnostic("E501", cause, _remedy()) from None
        if status:
            raise Diagnostic("E501", f"NVRTC cannot be started: {status.name}", _remedy())
        return NvrtcToolchain(target, f"{major}.{minor}")

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's arguments; the suffix in `sm_90a` enables instructions that only this architecture has."""
        arch = self.target.arch
        exact = arch[-1] in "af" or int(arch.removeprefix("sm_")) < _FEATURES
        return f"-arch={arch}{'' if exact else 'a'}", "-std=c++17"

    def key(self, source: Source) -> str:
        """Return a hash of text, launch, options and version: 32 hexadecimal digits."""
        maps = [(m.param, len(m.shape), m.box, m.swizzle) for m in source.maps]
        passes = [(p.kind, p.index, p.nbytes) for p in source.passes]
        launch = [source.entry, passes, source.threads, source.shared, maps]
        if source.cluster:
            grid = [str(d) for d in source.grid]
            launch += [source.cluster, grid]
        what = [source.text, *launch, self.options, self.version]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGEST]

    def cached(self, key: str, cache: Path) -> bool:
        """Whether the cache has an entry for the key."""
        return entry_path(cache, key).is_file()

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """Compile pairs (source, location) in up to `jobs` threads; return key -> cubin.

        Raises Diagnostic E502 with the first error of the first source that does not compile, and E505 if a binary's
        parameters differ from those that its launches pass.
        """

        def compile_one(key: str, source: Source, loc: str) -> Compiled:
            return self._compiled(key, source, loc, cache)

        return compile_in_threads(sources, self.key, compile_one, cache, jobs, progress)

    def _compiled(self, key: str, source: Source, loc: str, cache: Path) -> Compiled:
        path = entry_path(cache, key)
        if (entry := read_entry(path)) is not None:
            return entry
        binary, message = compile_text(source.text, self.options)
        if message:
            lines = [line.strip() for line in message.splitlines()]
            first = next((line for line in lines if "error" in line), lines[0])
            saved = cache / f"{key}.failed.cu"
            raise compile_error(f"NVRTC {self.version}", source, first, saved, loc, message)
        check_launch(source, binary, loc)
        boxes = tuple((m.box, m.swizzle) for m in source.maps)
        compiled = Compiled(binary, source.threads, source.shared, boxes)
        write_entry(path, compiled)
        return compiled


def compile_text(text: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Return (cubin, ""), or (b"", the compiler's messages) if the text does not compile."""
    from cuda.bindings import nvrtc

    program = _ok(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if status:
            log = b" " * _ok(nvrtc.nvrtcGetProgramLogSize(program))
            _ok(nvrtc.nvrtcGetProgramLog(program, log))
            return b"", log.rstrip(b"\0 ").decode(errors="replace").strip() or str(status.name)
        cubin = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program))
        _ok(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, ""
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _ok(result: tuple[Any, ...]) -> Any:
    """Return the value of an NVRTC call; raises RuntimeError with the status if it failed."""
    status, *values = result
    if status:
        raise RuntimeError(f"NVRTC failed: {status.name}")
    return values[0] if values else None


def _remedy() -> str:
    return f"{install_command('nvrtc')} (no GPU is needed to compile)"
