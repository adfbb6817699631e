"""The language "cute": kernels in the CuTe DSL, compiled ahead of time in a separate process, without a GPU."""
