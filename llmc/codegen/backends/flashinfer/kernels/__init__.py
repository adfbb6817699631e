"""Texts of kernels around those of FlashInfer; the toolchain supplies the headers that they include."""
