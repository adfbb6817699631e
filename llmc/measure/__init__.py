"""Verification and measurement of artifacts: commands that run compiled programs. Compiling does not import this."""
