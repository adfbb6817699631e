"""The messages between the engine, the grammar host and its workers: datagrams on Unix sockets.

- Engine to host: SPAWN (with two descriptors: the worker's socket and a file with the definition) and KILL, each with
  the worker's number.
- Host to engine: READY or FAILED (with a text) for the vocabulary, and ENDED for a worker.
- Engine to worker: OPEN, ACCEPT (with tokens), LOOK (with drafted tokens) and CLOSE, with the guide's number and the
  number of the operation.
- Worker to engine: COMPILED (with the bytes of its private memory) or REFUSED, then for each OPEN and ACCEPT one of
  MASK, SAME (the mask is the one sent before), STOPPED and BROKEN (with a text). For each LOOK the masks after the
  drafts, AHEAD or SAME_AHEAD, up to the first draft that is not allowed, or is the last of the text (AHEAD without a
  mask), then AHEAD_END. A result has the number of the operation. GREW has the bytes of private memory once they have
  grown.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

SPAWN, KILL = b"S", b"K"
READY, FAILED, ENDED = b"R", b"F", b"E"
OPEN, ACCEPT, CLOSE, LOOK = range(4)
COMPILED, REFUSED, MASK, SAME, STOPPED, BROKEN, AHEAD, SAME_AHEAD, AHEAD_END, GREW = range(10)

ORDER = struct.Struct("<cI")  # to the host: type, worker number
END = struct.Struct("<cIi")  # from the host: ENDED, worker number, wait status
OPERATION = struct.Struct("<IBI")  # to a worker: guide number, type, operation number; followed by int32 tokens
RESULT = struct.Struct("<IBI")  # from a worker: guide number, type, operation number; followed by a mask or a text
MAX_DATAGRAM_BYTES = 1 << 18  # per datagram


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return the tokens of an operation as bytes."""
    return array("i", tokens).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Return the tokens of an operation, whose bytes are `data`."""
    return array("i", data).tolist()
