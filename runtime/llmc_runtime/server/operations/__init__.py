"""Admission control, metrics and memory settings of the server."""
