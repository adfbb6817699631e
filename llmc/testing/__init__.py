"""Tests of kernels against the references of their ops, on any machine; part of the public interface for extensions.

    from llmc.testing import check_kernel

    def test_my_kernel():
        check_kernel(KERNEL, my_op)

C++ kernels are compiled and run on this CPU, Triton kernels in Triton's interpreter. Outputs are poisoned before, and
the bytes around all buffers are checked after. Kernels of every language are compiled for a target without its device.
Each name is imported on first access.
"""

from __future__ import annotations

from types import MappingProxyType

from llmc.extend.exports import importer

_EXPORTS = MappingProxyType(
    {
        "Case": "llmc.testing.case:Case",
        "case_of": "llmc.testing.case:case_of",
        "check_case": "llmc.testing.check:check_case",
        "check_kernel": "llmc.testing.check:check_kernel",
        "compile_for": "llmc.testing.check:compile_for",
        "cubin_entry": "llmc.codegen.cubin:read_entry",
        "interpreting": "llmc.testing.triton_interpreter:interpreting",
        "op_example": "llmc.ir.example:op_example",
        "run_on_cpu": "llmc.testing.check:run_on_cpu",
        "template_function": "llmc.testing.triton_interpreter:template_function",
    }
)
__all__ = [*_EXPORTS]
__getattr__, __dir__ = importer(__name__, _EXPORTS)
