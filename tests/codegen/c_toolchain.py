"""A language of another package, first of two files: a toolchain for C, which uses the C++ toolchain's compiler."""

from __future__ import annotations

from llmc.codegen.backends.cpp.cpp_toolchain import CppToolchain
from llmc.codegen.toolchain import Output
from llmc.targets.target import Target


class CToolchain(CppToolchain):
    """The language "c": the C++ toolchain's compiler in its C mode."""

    output = Output("c", "so", "cpu-1")

    @staticmethod
    def of(target: Target) -> CToolchain:
        found = CppToolchain.find(target)
        return CToolchain(found.compiler, found.version, ("-std=c11", "-O2", "-fPIC", "-shared", "-x", "c"))
