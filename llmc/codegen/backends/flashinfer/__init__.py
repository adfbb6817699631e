"""The language "flashinfer": CUDA C++ that includes kernels of the package flashinfer-python, compiled by NVRTC."""
