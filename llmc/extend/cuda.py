"""Kernels in CUDA C++ for NVIDIA GPUs: the base class of bindings."""

from llmc.codegen.backends.cuda.cuda_kernel import CTYPES, FLOATS, Binding, CudaKernel

__all__ = ["CTYPES", "FLOATS", "Binding", "CudaKernel"]
