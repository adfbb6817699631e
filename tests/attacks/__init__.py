"""Attacks from outside on a running server, one named test for each class of published advisory; no server code."""
