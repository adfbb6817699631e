"""The language "cuda": CUDA C++ kernels, compiled ahead of time by NVRTC without a GPU."""
