"""Passes: frozen dataclasses that transform a module in place. The pipeline of a target lists the passes to run."""
