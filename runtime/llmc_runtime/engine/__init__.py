"""The engine in a process of its own: its loop, what is said to it and by it, who watches it, and AsyncLLM. No HTTP.

Everything here but `args` needs the extra "serve" (pyzmq, msgspec).
"""
