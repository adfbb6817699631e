"""Kernels in Triton for GPUs: the base class of bindings, and templates."""

from llmc.codegen.backends.triton.template import Template, record
from llmc.codegen.backends.triton.triton_kernel import CODES, Code, TritonKernel, Unit, element, unsupported
from llmc.ir.dtype import FLOATS, INTS

__all__ = ["CODES", "FLOATS", "INTS", "Code", "Template", "TritonKernel", "Unit", "element", "record", "unsupported"]
