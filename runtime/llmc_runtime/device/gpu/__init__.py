"""Shared code of the GPU devices: rings of staging memory, uploads, graphs from lists of launches."""
