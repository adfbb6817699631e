"""The toolchain of the language "cuda": CUDA C++ text to cubins by NVRTC, in this process and without a GPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.codegen.cubin import check_launch
from llmc.codegen.kernel import Source
from llmc.codegen.kernel_cache import entry_path, read_entry, write_entry
from llmc.codegen.toolchain import Compiled, Output, Progress, compile_error, compile_in_threads
from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

_DIGEST = 32
_FEATURES = 90  # compute capability, in tenths, from which kernels may use the features of one architecture alone
_REMEDY = "pip install 'llmc-aot[nvidia]' (no GPU is needed to compile)"


@dataclass(frozen=True)
class NvrtcToolchain:
    """NVRTC for one target. Equal text, launch and version give the same key, and one compilation.

    A text is all there is: NVRTC gets no include path, so a key needs no hashes of headers. Sources have no options.
    """

    target: Target
    version: str
    name = "nvrtc"
    output = Output("cu", "cubin", "cuda-1")

    @staticmethod
    def find(target: Target) -> NvrtcToolchain:
        """Raises Diagnostic E501 if NVRTC or its Python bindings are not installed."""
        try:
            from cuda.bindings import nvrtc

            status, major, minor = nvrtc.nvrtcVersion()
        except (ImportError, RuntimeError, OSError):
            cause = f"a kernel for {target.name} is in CUDA C++, and NVRTC is not installed"
            raise Diagnostic("E501", cause, _REMEDY) from None
        if status:
            raise Diagnostic("E501", f"NVRTC does not start: {status.name}", _REMEDY)
        return NvrtcToolchain(target, f"{major}.{minor}")

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's arguments; `sm_90a` has the instructions of Hopper that no later architecture has."""
        arch = self.target.arch
        exact = arch[-1] in "af" or int(arch.removeprefix("sm_")) < _FEATURES
        return f"-arch={arch}{'' if exact else 'a'}", "-std=c++17"

    def key(self, source: Source) -> str:
        """A hash of text, launch, options and version: 32 hexadecimal digits."""
        maps = [(m.param, len(m.shape), m.box, m.swizzle) for m in source.maps]
        passes = [(p.kind, p.index, p.nbytes) for p in source.passes]
        launch = [source.entry, passes, source.threads, source.shared, maps]
        what = [source.text, *launch, self.options, self.version]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:_DIGEST]

    def cached(self, key: str, cache: Path) -> bool:
        """Whether the cache has an entry for the key."""
        return entry_path(cache, key).is_file()

    def compile(
        self, sources: Sequence[tuple[Source, str]], cache: Path, jobs: int = 2, progress: Progress | None = None
    ) -> dict[str, Compiled]:
        """key -> cubin of every (source, location), `jobs` threads at a time.

        Raises Diagnostic E502 with the first error of the first text that does not compile, and E505 if a binary takes
        other parameters than its launches pass.
        """

        def one(key: str, source: Source, loc: str) -> Compiled:
            return self._one(key, source, loc, cache)

        return compile_in_threads(sources, self.key, one, cache, jobs, progress)

    def _one(self, key: str, source: Source, loc: str, cache: Path) -> Compiled:
        path = entry_path(cache, key)
        if (found := read_entry(path)) is not None:
            return found
        binary, why = compile_text(source.text, self.options)
        if why:
            raise compile_error(f"NVRTC {self.version}", source, why, cache / f"{key}.failed.cu", loc)
        check_launch(source, binary, loc)
        boxes = tuple((m.box, m.swizzle) for m in source.maps)
        made = Compiled(binary, source.threads, source.shared, boxes)
        write_entry(path, made)
        return made


def compile_text(text: str, options: Sequence[str]) -> tuple[bytes, str]:
    """(cubin, ""), or (b"", the first error) if the text does not compile."""
    from cuda.bindings import nvrtc

    program = _ok(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if status:
            log = b" " * _ok(nvrtc.nvrtcGetProgramLogSize(program))
            _ok(nvrtc.nvrtcGetProgramLog(program, log))
            lines = log.rstrip(b"\0 ").decode(errors="replace").splitlines()
            return b"", next((x.strip() for x in lines if "error" in x), status.name)
        cubin = b" " * _ok(nvrtc.nvrtcGetCUBINSize(program))
        _ok(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, ""
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _ok(answer: tuple[Any, ...]) -> Any:
    """The value of a call. Raises RuntimeError with the status if it failed: texts alone fail to compile."""
    status, *values = answer
    if status:
        raise RuntimeError(f"NVRTC failed: {status.name}")
    return values[0] if values else None
