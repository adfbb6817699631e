"""Code generation: from a graph whose kernels are chosen to source, binaries and programs; not the choice of passes."""
