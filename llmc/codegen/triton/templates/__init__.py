"""Template kernels: modules of Triton functions that llmc renders into kernels, and that run as they stand.

llmc reads these modules as text (see `llmc.codegen.triton.template`) and never imports them, because a machine that
emits kernels may have no Triton.
"""
