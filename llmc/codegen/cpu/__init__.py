"""Kernels of the CPU targets, as generated C++; the table of them is `llmc.codegen.cpu.table`."""
