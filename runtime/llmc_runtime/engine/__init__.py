"""The engine: its step loop, requests and outputs, and the process, client and supervisor with which AsyncLLM runs it.

messages, client, control_rpc, engine_loop, engine_process and supervisor need the extra "serve" (pyzmq, msgspec).
"""
