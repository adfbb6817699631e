"""The toolchain of the language "cute": CuTe DSL texts to cubins, each in a separate process and without a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from llmc_runtime.format.install_command import install_command

from llmc.codegen.cubin_toolchain import CubinToolchain, lacking, launch_facts
from llmc.codegen.kernel import Source
from llmc.codegen.scratch_dir import scratch
from llmc.codegen.toolchain import Output, digest
from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

# The packages that kernels are compiled with. Kernels change parts of them that are not public: other versions are
# refused. pyproject.toml declares the same versions in the extra `flash`.
PACKAGES: Mapping[str, str] = MappingProxyType(
    {"nvidia-cutlass-dsl": "4.8.1", "quack-kernels": "0.6.5", "flash-attn-4": "4.0.0b36"}
)
VERSION = " ".join(f"{name} {version}" for name, version in PACKAGES.items())
WORKER = "llmc.codegen.backends.cute.compile_worker"
_KILLED = -9  # the status of a process that the kernel ended for lack of memory


@dataclass(frozen=True)
class CuteToolchain(CubinToolchain):
    """The CuTe DSL for one target. Equal text, launch and versions give the same key, and one compilation."""

    target: Target
    version: str = VERSION
    name, suffix = "cute", "py"
    output = Output("cute.py", "cubin", "cuda-1")

    @staticmethod
    def find(target: Target) -> CuteToolchain:
        """Return the toolchain of `target`; raises Diagnostic E501 if packages are missing or have other versions."""
        if why := missing():
            raise Diagnostic("E501", f"a kernel for {target.name} is written in the CuTe DSL, but {why}", remedy())
        return CuteToolchain(target)

    def key(self, source: Source) -> str:
        """Return a hash of text, launch, architecture and versions: 32 hexadecimal digits."""
        return digest([source.text, *launch_facts(source), self.target.arch, self.version])

    @property
    def compiler(self) -> str:
        """The name and versions of the compiler."""
        return f"CuTe DSL ({self.version})"

    def translate(self, source: Source) -> tuple[bytes, str]:
        """Compile the text in a separate process; raises Diagnostic E503 if that was killed."""
        return compile_text(source, self.target.arch)

    def reason(self, lines: Sequence[str]) -> str:
        """Return the last line, that of the exception."""
        return lines[-1]


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
    return lacking(PACKAGES)


def remedy() -> str:
    """Return the instruction to install the packages."""
    return f"{install_command('flash')} (no GPU is needed to compile)"
