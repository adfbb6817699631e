"""Passes that split one node into several for more parallelism."""
