"""The Python API: LLM and AsyncLLM."""
