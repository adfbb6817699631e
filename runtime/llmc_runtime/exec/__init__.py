"""Execution of programs on a device: state buffers, steps and the canary."""
