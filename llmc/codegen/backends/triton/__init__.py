"""Triton: emitters of kernels for NVIDIA and AMD GPUs, and the toolchain that compiles them without one."""
