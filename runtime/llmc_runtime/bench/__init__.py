"""`llmc bench`: measures a server under load, offline throughput, batch latency and startup time.

The load generator of `serve` speaks HTTP/1.1 over asyncio in client processes of its own, and requires only NumPy.
"""
