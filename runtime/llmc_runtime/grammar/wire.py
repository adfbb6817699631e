"""The messages between the engine, the grammar host and its workers: datagrams on Unix sockets.

Engine to host: SPAWN (with two descriptors: the worker's socket, a file with the definition) and KILL, each with the
worker's number. Host to engine: READY or FAILED (with a text) for the vocabulary, ENDED for a worker.
Engine to worker: OPEN, ACCEPT and CLOSE with the guide's number and a token. Worker to engine: COMPILED or REFUSED,
then for each OPEN and ACCEPT one MASK, SAME (the mask did not change), STOPPED or BROKEN (with a text).
"""

from __future__ import annotations

import struct

SPAWN, KILL = b"S", b"K"
READY, FAILED, ENDED = b"R", b"F", b"E"
OPEN, ACCEPT, CLOSE = 0, 1, 2
COMPILED, REFUSED, MASK, SAME, STOPPED, BROKEN = range(6)

ORDER = struct.Struct("<cI")  # to the host: what, the worker's number
END = struct.Struct("<cIi")  # from the host: ENDED, the worker's number, its wait status
OPERATION = struct.Struct("<IBi")  # to a worker: the guide's number, what, the token
RESULT = struct.Struct("<IB")  # from a worker: the guide's number, what; a mask or a text follows
MOST = 1 << 18  # bytes of a datagram
