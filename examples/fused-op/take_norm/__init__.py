"""What this package offers llmc, as names and places; none of the places is imported before somebody names it."""

from llmc import Extension

EXTENSION = Extension(
    "take-norm",
    ops={"take_norm": "take_norm.op:take_norm"},
    passes={"fuse-take-norm": "take_norm.fuse:FuseTakeNorm"},
    kernels={"take-norm/triton": "take_norm.triton:KERNEL", "take-norm/cpp": "take_norm.cpp:KERNEL"},
)
