"""The base class of CUDA C++ kernels: makes a Source from a `.cu` file and the constants of a node.

A kernel is a file of CUDA C++ with one `extern "C" __global__` function, and a class whose `bind` supplies the file's
constants and the launch. The function's parameters are, in this order:

- a pointer for each operand, then for each result; in place of a pointer that `Binding.maps` names, a
  `const __grid_constant__ TensorMap`;
- an `int` for each of `Binding.sizes`, the sizes that are known only at run time;
- a `float` or an `int` for each of `Binding.values`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from types import MappingProxyType

from llmc.codegen.backends.cuda import nvrtc_toolchain
from llmc.codegen.emit import Sizes, describe, unsupported_dtype
from llmc.codegen.kernel import Kernel, Map, Param, Schedule, Source
from llmc.ir.dim import D, Dim
from llmc.ir.graph import Node
from llmc.targets.target import PDL, Target

# The element types of the IR in CUDA C++.
CTYPES: Mapping[str, str] = MappingProxyType(
    {
        "f32": "float", "bf16": "bf16", "f16": "f16", "i64": "long long", "i32": "int", "i16": "short",
        "i8": "signed char", "u32": "unsigned", "u16": "unsigned short", "u8": "unsigned char", "bool": "bool",
    }
)  # fmt: skip
FLOATS = ("f32", "bf16", "f16")
KERNELS = "llmc.codegen.backends.cuda.kernels"  # the package of llmc's own files


@dataclass(frozen=True)
class Binding:
    """The constants that a `.cu` file expects and the launch of its function.

    grid: blocks along x, y and z; threads: threads of a block; shared: bytes of dynamic shared memory. constants: name
    -> an integer (`constexpr int`), a float (`constexpr float`) or a type (`using`). sizes, values: see the module
    docstring. maps: operands passed as tensor maps, with their strides, offsets and swizzles. cluster: blocks of a
    cluster along x, y and z. text: generated functions that the file calls.
    """

    grid: tuple[Dim | int, ...]
    threads: int
    constants: Mapping[str, int | float | str]
    shared: int = 0
    sizes: tuple[Dim, ...] = ()
    values: tuple[int | float, ...] = ()
    maps: tuple[Map, ...] = ()
    cluster: tuple[int, ...] = ()
    text: str = ""

    def passes(self, values: int) -> tuple[Param, ...]:
        """Return the parameters of a launch; `values` is the number of operands and results."""
        maps = {m.param: Param("map", i) for i, m in enumerate(self.maps)}
        return (
            *(maps.get(i, Param("arg", i)) for i in range(values)),
            *(Param("size", size=d, type="i32") for d in self.sizes),
            *(Param("value", value=x, type="i32" if isinstance(x, int) else "f32") for x in self.values),
        )


@dataclass(frozen=True)
class CudaKernel(Kernel):
    """A kernel in CUDA C++.

    file: "package:name.cu", a resource of an importable package; without a package, one of llmc's own files. entry: the
    name of its kernel function. headers: resources whose text precedes the constants. before: resources whose text uses
    the constants, before the file's.
    """

    language: str = "cuda"
    file: str = ""
    headers: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    entry: str = ""

    def reject(self, node: Node, target: Target) -> str | None:
        return unsupported_dtype(node, tuple(CTYPES))

    def bind(self, node: Node, schedule: Schedule, target: Target) -> Binding:
        """Return the constants and the launch for a node."""
        raise NotImplementedError

    def emit(self, node: Node, schedule: Schedule, target: Target) -> Source:
        b = self.bind(node, schedule, target)
        head = describe(self.name, node, schedule, Sizes("s{}", list(b.sizes)))
        defines = f"#define LLMC_PDL {int(target.has(PDL))}"
        constants = "\n".join(_constant(name, x) for name, x in b.constants.items())
        parts = [
            f"// {head}\n{defines}",
            *(_text(header) for header in ("device.cuh", *self.headers)),
            constants,
            *([b.text] if b.text else []),
            *(_text(part) for part in (*self.before, self.file)),
        ]
        return Source(
            self.entry, self.language, "\n\n".join(p.strip() for p in parts) + "\n", threads=b.threads,
            shared=b.shared, grid=tuple(D(g) for g in (*b.grid, 1, 1)[:3]), pdl=target.has(PDL), maps=b.maps,
            passes=b.passes(len(node.operands) + len(node.results)), cluster=b.cluster,
        )  # fmt: skip


class OptionalCudaKernel(CudaKernel):
    """Base class of kernels of ops that Triton implements, too: without NVRTC, `select` uses another kernel."""

    def missing(self) -> str:
        return nvrtc_toolchain.missing()


def _constant(name: str, value: int | float | str) -> str:
    """Print the C++ definition of a constant or type."""
    if isinstance(value, str):
        return f"using {name} = {value};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    return f"constexpr float {name} = {value!r}f;"


@lru_cache(maxsize=64)
def _text(file: str) -> str:
    """Read a package resource, named "package:file", or "file" for one of llmc's own."""
    package, _, name = file.rpartition(":")
    return resources.files(package or KERNELS).joinpath(name).read_text()
