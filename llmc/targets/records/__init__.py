"""Measured choices of kernels by machine, as data: NAME.jsonl files that `select` reads; see llmc.codegen.tuning."""
