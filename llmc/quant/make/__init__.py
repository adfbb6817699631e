"""Quantises checkpoints: `llmc quantize` reads a Hugging Face folder and writes one of compressed-tensors."""
