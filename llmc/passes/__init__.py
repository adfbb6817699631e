"""Passes: frozen dataclasses that transform a module in place. Each target's pipeline text says which ones run."""
