"""The extension: the kernel's name and where it is; nothing is imported before the name is used."""

from llmc.extend import Extension

EXTENSION = Extension("rms-norm-cuda", kernels={"rms-norm/cuda": "rms_norm_cuda.kernel:KERNEL"})
