"""Checks that two modules compute the same function, by interpreting both on random inputs."""
