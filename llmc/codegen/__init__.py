"""Code generation: from a graph whose kernels are chosen to kernel sources, binaries and programs."""
