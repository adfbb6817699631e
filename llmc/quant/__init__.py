"""Quantised checkpoints: one module per scheme, which documents the stored tensors and decodes them."""
