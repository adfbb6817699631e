"""The messages between the engine, the grammar host and its workers: datagrams on Unix sockets.

- Engine to host: SPAWN (with two descriptors: the worker's socket and a file with the definition) and KILL, each with
  the worker's number.
- Host to engine: READY or FAILED (with a text) for the vocabulary, and ENDED for a worker.
- Engine to worker: OPEN, ACCEPT and CLOSE with the guide's number and a token.
- Worker to engine: COMPILED or REFUSED, then for each OPEN and ACCEPT one of MASK, SAME (the mask did not change),
  STOPPED and BROKEN (with a text).
"""

from __future__ import annotations

import struct

SPAWN, KILL = b"S", b"K"
READY, FAILED, ENDED = b"R", b"F", b"E"
OPEN, ACCEPT, CLOSE = 0, 1, 2
COMPILED, REFUSED, MASK, SAME, STOPPED, BROKEN = range(6)

ORDER = struct.Struct("<cI")  # to the host: type, worker number
END = struct.Struct("<cIi")  # from the host: ENDED, worker number, wait status
OPERATION = struct.Struct("<IBi")  # to a worker: guide number, type, token
RESULT = struct.Struct("<IB")  # from a worker: guide number, type; followed by a mask or a text
MAX_BYTES = 1 << 18  # per datagram
