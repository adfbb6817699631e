"""The engine: requests, the loop over steps, and the engine process with its client and supervisor.

The modules of the engine process and its client need the extra "serve" (pyzmq, msgspec).
"""
