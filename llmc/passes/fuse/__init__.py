"""Passes that replace groups of nodes with one node."""
