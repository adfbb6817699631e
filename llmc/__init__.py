"""The compiler: a Hugging Face model becomes text, then better text, then kernels, then a folder. It runs no model."""
