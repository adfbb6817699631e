"""Passes that simplify a graph: canonical forms, common subexpressions, dead code."""
