"""The extension: maps names to the places that implement them, which are imported on first use."""

from llmc.extend import Extension

EXTENSION = Extension(
    "take-norm",
    ops={"take_norm": "take_norm.op:take_norm"},
    passes={"fuse-take-norm": "take_norm.fuse:FuseTakeNorm"},
    kernels={"take-norm/triton": "take_norm.triton:KERNEL", "take-norm/cpp": "take_norm.cpp:KERNEL"},
)
