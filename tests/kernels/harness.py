"""Runs compiled C++ kernels on random inputs and compares them with the reference, by `llmc.testing`."""

from llmc.testing.case import POISON_BYTE, Bound, Buffer, Case
from llmc.testing.cpu import Ctx, batch, compile_cases, run_case

__all__ = ["POISON_BYTE", "Bound", "Buffer", "Case", "Ctx", "batch", "compile_cases", "run_case"]
