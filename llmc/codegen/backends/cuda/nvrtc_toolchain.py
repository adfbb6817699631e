"""The toolchain of the language "cuda": CUDA C++ text to cubins by NVRTC, in this process and without a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from llmc_runtime.format.install_command import install_command

from llmc.codegen.cubin_toolchain import CubinToolchain, launch_facts
from llmc.codegen.kernel import Source
from llmc.codegen.toolchain import Output, digest
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
            return NvrtcToolchain(target, nvrtc_version())
        except ModuleNotFoundError as e:
            cause = f"a kernel for {target.name} is written in CUDA C++, but {e}"
            raise Diagnostic("E501", cause, _remedy()) from None

    def key(self, source: Source) -> str:
        """Return a hash of text, launch, options and version: 32 hexadecimal digits."""
        launch = launch_facts(source)
        if source.cluster:
            launch += [source.cluster, [str(d) for d in source.grid]]
        return digest([source.text, *launch, options(self.target), self.version])

    @property
    def compiler(self) -> str:
        """The name and version of the compiler."""
        return f"NVRTC {self.version}"

    def translate(self, source: Source) -> tuple[bytes, str]:
        """Compile the text in this process."""
        return compile_text(source.text, options(self.target))


def nvrtc_version() -> str:
    """Return the version of NVRTC; raises ModuleNotFoundError if it or its bindings cannot be used."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError):
        raise ModuleNotFoundError("NVRTC is not installed") from None
    if status:
        raise ModuleNotFoundError(f"NVRTC cannot be started: {status.name}")
    return f"{major}.{minor}"


def missing() -> str:
    """Return why NVRTC cannot be used and what installs it, or ""."""
    try:
        nvrtc_version()
    except ModuleNotFoundError as e:
        return f"{e}; {_remedy()}"
    return ""


def options(target: Target) -> tuple[str, ...]:
    """Return the compiler's arguments for a target.

    The suffix in `sm_90a` enables instructions that only this architecture has.
    """
    exact = target.arch[-1] in "af" or int(target.arch.removeprefix("sm_")) < _FEATURES
    return f"-arch={target.arch}{'' if exact else 'a'}", "-std=c++17"


def compile_text(
    text: str, options: Sequence[str], headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, str]:
    """Return (cubin, ""), or (b"", the compiler's messages) if the text does not compile.

    headers: name -> text of the files that it may include.
    """
    from cuda.bindings import nvrtc

    names = [name.encode() for name in headers]
    texts = [header.encode() for header in headers.values()]
    program = _ok(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", len(names), texts, names))
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
