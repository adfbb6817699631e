"""Targets: records that describe machines."""
