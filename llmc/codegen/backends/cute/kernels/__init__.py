"""Texts of CuTe kernels; `compile_worker` executes them after a node's constants."""
