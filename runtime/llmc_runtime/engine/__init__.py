"""The engine: requests, the loop over steps, and the engine process with its client and supervisor.

messages, session, client, control_rpc, engine_loop, engine_process and supervisor need the extra "serve" (pyzmq,
msgspec).
"""
