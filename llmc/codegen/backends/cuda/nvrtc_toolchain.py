"""The toolchain of the language "cuda": CUDA C++ text to cubins by NVRTC, in this process and without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmc_runtime.format.install_command import install_command

from llmc.codegen.cubin_toolchain import CubinToolchain, digest, launch_facts
from llmc.codegen.kernel import Source
from llmc.codegen.toolchain import Output
from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

_FEATURES = 90  # compute capability x 10 from which the suffix "a" enables architecture-specific instructions


@dataclass(frozen=True)
class NvrtcToolchain(CubinToolchain):
    """NVRTC for one target. Equal text, launch and version give the same key, and one compilation.

    NVRTC gets no include path, so a source is self-contained and a key needs no hashes of headers. Sources have no
    options.
    """

    target: Target
    version: str
    name, suffix = "nvrtc", "cu"
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
        launch = launch_facts(source)
        if source.cluster:
            launch += [source.cluster, [str(d) for d in source.grid]]
        return digest([source.text, *launch, self.options, self.version])

    @property
    def compiler(self) -> str:
        """The name and version of the compiler."""
        return f"NVRTC {self.version}"

    def translate(self, source: Source) -> tuple[bytes, str]:
        """Compile the text in this process."""
        return compile_text(source.text, self.options)

    def reason(self, lines: Sequence[str]) -> str:
        """Return the first line that names an error."""
        return next((line for line in lines if "error" in line), lines[0])


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
