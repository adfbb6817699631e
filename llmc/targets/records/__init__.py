"""Measured times of kernels by machine, as NAME.jsonl files (see llmc.codegen.tuning_records), which `select` reads."""
