"""Attacks on a running server from outside, with one test for each class of published advisories."""
