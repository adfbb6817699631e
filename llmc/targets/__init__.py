"""Targets as records: what a machine is, never how code is made for it."""
