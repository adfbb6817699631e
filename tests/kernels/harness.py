"""Runs compiled C++ kernels on drawn inputs beside the reference: `llmc.testing`, as the kernel tests name it."""

from llmc.testing.case import POISON, Bound, Buffer, Case
from llmc.testing.cpu import Ctx, batch, compile_cases, run_case

__all__ = ["POISON", "Bound", "Buffer", "Case", "Ctx", "batch", "compile_cases", "run_case"]
