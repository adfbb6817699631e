"""Scheduling: which rows compute which tokens next. Pure Python over lists of ints: no device, no clock, no model."""
