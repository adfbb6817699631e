"""Passes over expressions of weights: folding them, and moving them to the weights graph."""
