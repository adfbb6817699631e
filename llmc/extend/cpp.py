"""Kernels in C++ for CPUs: the base class of bindings, and what writes their text."""

from llmc.codegen.backends.cpp.cpp_kernel import CTYPES, CppKernel, Sizes, ctype, pointers, unsupported
from llmc.ir.dtype import FLOATS, INTS

__all__ = ["CTYPES", "FLOATS", "INTS", "CppKernel", "Sizes", "ctype", "pointers", "unsupported"]
