"""The toolchain of the language "flashinfer": texts that include FlashInfer's headers, to cubins by NVRTC."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import distribution, version

from llmc_runtime.format.install_command import install_command

from llmc.codegen.backends.cuda.nvrtc_toolchain import compile_text, nvrtc_version, options
from llmc.codegen.backends.flashinfer.xqa_source import CHANGES, DISTRIBUTION, END, FILES, headers
from llmc.codegen.cubin_toolchain import CubinToolchain, lacking, launch_facts
from llmc.codegen.kernel import Source
from llmc.codegen.toolchain import Output, digest
from llmc.diagnostics import Diagnostic
from llmc.targets.target import Target

# llmc changes texts of the package, so that only one version is supported. pyproject.toml declares it in the extra
# `flashinfer`.
SUPPORTED = "0.7.2.post1"
CUDA_HEADERS, FOLDER, MAJOR = "nvidia-cuda-runtime", "nvidia/cu13/include", "13."
# What the headers need of a host's library. Their assertions are disabled, as in the package's own builds.
HOST_HEADERS = (("cassert", "#undef assert\n#define assert(x) ((void)0)\n"),)


@dataclass(frozen=True)
class FlashinferToolchain(CubinToolchain):
    """NVRTC with FlashInfer's headers and CUDA's, for one target. Equal text, launch and versions give the same key.

    version: those of NVRTC and of the packages.
    """

    target: Target
    version: str
    name, suffix = "flashinfer", "cu"
    output = Output("cu", "cubin", "cuda-1")

    @staticmethod
    def find(target: Target) -> FlashinferToolchain:
        """Return the toolchain of `target`; raises Diagnostic E501 for missing packages or other versions."""
        if why := missing():
            raise Diagnostic("E501", f"a kernel for {target.name} includes FlashInfer's headers, but {why}", remedy())
        packages = ", ".join(f"{name} {version(name)}" for name in (DISTRIBUTION, CUDA_HEADERS))
        return FlashinferToolchain(target, f"NVRTC {nvrtc_version()}, {packages}")

    def key(self, source: Source) -> str:
        """Return a hash of text, launch, options, versions and llmc's changes: 32 hexadecimal digits."""
        changes = [[name, [[c.old, c.new] for c in of_file]] for name, of_file in CHANGES.items()]
        return digest([source.text, *launch_facts(source), options(self.target), self.version, FILES, END, changes])

    @property
    def compiler(self) -> str:
        """The name and versions of the compiler."""
        return f"NVRTC with FlashInfer's headers ({self.version})"

    def translate(self, source: Source) -> tuple[bytes, str]:
        """Compile the text in this process; raises Diagnostic E501 if the package's files are not those expected."""
        try:
            included = {**headers(), **dict(HOST_HEADERS)}
        except (OSError, ValueError) as e:
            raise Diagnostic("E501", f"the files of {DISTRIBUTION} {SUPPORTED} are damaged: {e}", remedy()) from e
        folder = distribution(CUDA_HEADERS).locate_file(FOLDER)
        return compile_text(source.text, (*options(self.target), "-default-device", f"-I{folder}"), included)


def missing() -> str:
    """Return the first package that is not installed or has an unsupported version, or ""."""
    if why := lacking({DISTRIBUTION: SUPPORTED, CUDA_HEADERS: MAJOR}):
        return why
    try:
        nvrtc_version()
    except ModuleNotFoundError as e:
        return str(e)
    return ""


def remedy() -> str:
    """Return the instruction to install the packages."""
    return f"{install_command('flashinfer')} (no GPU is needed to compile)"
