"""What `llmc bench` measures: a server under load, LLM offline, one batch, a start. It knows no device and no torch.

The load of `serve` speaks plain HTTP/1.1 over asyncio, in client processes of its own, and needs numpy alone.
"""
