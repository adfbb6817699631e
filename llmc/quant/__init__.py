"""Quantised checkpoints: one module per scheme, each saying which tensors it reads and what they mean."""
