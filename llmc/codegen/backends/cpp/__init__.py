"""The CPU back end: kernels as generated C++, listed in `llmc.codegen.backends.cpp.kernel_table`."""
