"""Template kernels: modules of Triton functions that llmc renders into kernels, and that can be run directly.

`llmc.codegen.backends.triton.template` reads these modules as text and never imports them, because a machine that
emits kernels may have no Triton.
"""
