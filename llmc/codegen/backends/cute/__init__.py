"""The language "cute": kernels in the CuTe DSL, compiled ahead of time in a process of their own, without a GPU."""
