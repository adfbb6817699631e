"""The CPU back end: kernels as generated C++, listed in `llmc.codegen.kernel_table`."""
