"""The C++ headers of the CPU kernels."""
