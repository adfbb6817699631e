"""The layout of the memory through which the ranks of a group on GPUs exchange results.

Every rank has one, into which all others write. It begins with a header of 8-byte words, which the host writes before
the first step, except for ENDED_WORD, which kernels set. Then follow one i32 counter of exchanges per program of a
kernel, and from DATA on the slots: CHUNK bytes for each program, each of SLOTS exchanges, and each source rank.
"""

from __future__ import annotations

RANK_WORD = 0  # word: the rank whose memory this is
LIMIT_WORD = 1  # word: nanoseconds that a kernel waits for another rank at most
STATUS_WORD = 2  # word: address of the group's status in host memory, an i32: 0, or an errno once the group has ended
ENDED_WORD = 3  # word: 1 once a kernel of this rank has given up
PEERS_WORD = 4  # first of MAX_PEERS words: the address of every rank's memory in this process
MAX_PEERS = 64  # maximum number of ranks
COUNTERS = 1024  # offset of the counters in bytes
PROGRAMS = 256  # maximum number of programs of a kernel that exchanges
DATA = 4096  # offset of the slots in bytes; they are multiples of 16
SLOTS = 8  # exchanges of a program that may be under way; a power of two, as counters wrap around
CHUNK = 8192  # bytes that a program sends to a rank in one exchange, at most
EMPTY = 0xFF  # every byte of a slot that holds no data


def group_bytes(ranks: int) -> int:
    """Return the size of each rank's memory in bytes."""
    return DATA + PROGRAMS * SLOTS * ranks * CHUNK
