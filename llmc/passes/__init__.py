"""Passes: frozen dataclasses that improve a module in place; which ones run is one line of text in a Target."""
