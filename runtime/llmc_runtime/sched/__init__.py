"""Scheduling: which rows compute which tokens next. Pure Python over lists of ints; it knows no device, no clock, no model."""
