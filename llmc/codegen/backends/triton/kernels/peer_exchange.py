"""The exchange of data between the ranks of a group, which write to each other's memory (format/group_memory.py).

In an exchange, a program of one rank sends chunks to the programs of the same number on other ranks. A chunk consists
of lanes of two words of 8 bytes. A word whose bits are all set has not arrived: senders never send one. The receiver
reads a lane until both of its words are there, and then empties it for a later exchange.

Exchanges are counted by each program, and use SLOTS slots in turn. All ranks run the same kernels in the same order,
so their counters agree. A program sends its exchange n + SLOTS only after it has received an exchange that the other
rank sent after emptying the slot of exchange n; kernel ends and `order_exchanges` order the two on both ranks. A rank
that waits longer than the limit, or whose group has ended, sets ENDED and stops exchanging.

Without ASSEMBLY (in the interpreter), the limit is a number of reads.
"""

import triton
import triton.language as tl
from llmc_runtime.format.group_memory import (
    CHUNK,
    COUNTERS,
    DATA,
    ENDED_WORD,
    LIMIT_WORD,
    PEERS_WORD,
    RANK_WORD,
    SLOTS,
    STATUS_WORD,
)

RANK_AT = tl.constexpr(RANK_WORD)
LIMIT_AT = tl.constexpr(LIMIT_WORD)
STATUS_AT = tl.constexpr(STATUS_WORD)
ENDED_AT = tl.constexpr(ENDED_WORD)
PEERS_AT = tl.constexpr(PEERS_WORD)
FIRST_COUNTER = tl.constexpr(COUNTERS)
FIRST_SLOT = tl.constexpr(DATA)
SLOT_COUNT = tl.constexpr(SLOTS)
SLOT_BYTES = tl.constexpr(CHUNK)
LANE_BYTES = tl.constexpr(16)
SLOT_LANES = tl.constexpr(CHUNK // 16)

READ = tl.constexpr("""{
.reg .pred inside;
mov.b64 $0, 0;
mov.b64 $1, 0;
setp.ne.s32 inside, $3, 0;
@inside ld.global.v2.b64 {$0, $1}, [$2];
}""")
WRITE = tl.constexpr("""{
.reg .pred inside;
setp.ne.s32 inside, $4, 0;
@inside st.global.v2.b64 [$1], {$2, $3};
mov.u32 $0, 0;
}""")
SEND = tl.constexpr("""{
.reg .pred inside;
setp.ne.s32 inside, $4, 0;
@inside st.relaxed.sys.global.v2.b64 [$1], {$2, $3};
mov.u32 $0, 0;
}""")
# Reads the lane at $2 until it is complete, and empties it. Every 1024 reads it looks at ENDED ($4) and at the clock;
# after 20 ms, it also looks at the status ($5), and after $6 nanoseconds it ends the group with ETIMEDOUT (110).
# The status is in host memory: if all threads that wait for a rank that is a little late read it, this rank is late
# for the next exchange, for which the other one then waits.
RECEIVE = tl.constexpr("""{
.reg .pred missing, other;
.reg .u32 reads, word;
.reg .u64 begin, now, empty;
mov.b64 $0, 0;
mov.b64 $1, 0;
setp.eq.s32 other, $3, 0;
@other bra DONE;
mov.u64 begin, %globaltimer;
mov.u32 reads, 0;
READ:
ld.relaxed.sys.global.v2.b64 {$0, $1}, [$2];
setp.eq.s64 missing, $0, -1;
setp.eq.s64 other, $1, -1;
or.pred missing, missing, other;
@!missing bra EMPTY;
add.u32 reads, reads, 1;
and.b32 word, reads, 1023;
setp.ne.u32 other, word, 0;
@other bra READ;
ld.relaxed.gpu.global.u32 word, [$4];
setp.ne.u32 other, word, 0;
@other bra DONE;
mov.u64 now, %globaltimer;
sub.u64 now, now, begin;
setp.lt.u64 other, now, 20000000;
@other bra READ;
ld.relaxed.sys.global.u32 word, [$5];
setp.ne.u32 other, word, 0;
@other bra END;
setp.lt.u64 other, now, $6;
@other bra READ;
mov.u32 word, 110;
st.relaxed.sys.global.u32 [$5], word;
END:
mov.u32 word, 1;
st.relaxed.gpu.global.u32 [$4], word;
bra DONE;
EMPTY:
mov.b64 empty, -1;
st.global.v2.b64 [$2], {empty, empty};
DONE:
}""")
# One thread's fence, between barriers, orders what all threads have done.
FENCE = tl.constexpr("""{
.reg .pred first;
.reg .u32 thread;
mov.u32 thread, %tid.x;
setp.eq.u32 first, thread, 0;
@first fence.acq_rel.sys;
mov.u32 $0, $1;
}""")


@triton.jit
def read_lane(address, inside, ASSEMBLY: tl.constexpr):
    """Return the two words of the lanes at these addresses, 0 outside."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            READ, "=&l,=&l,l,r", [address, inside.to(tl.int32)], (tl.int64, tl.int64), False, 1
        )
    else:
        words = address.to(tl.pointer_type(tl.int64))
        return tl.load(words, mask=inside, other=0), tl.load(words + 1, mask=inside, other=0)


@triton.jit
def write_lane(address, low, high, inside, ASSEMBLY: tl.constexpr):
    """Write lanes to this rank's own memory."""
    if ASSEMBLY:
        tl.inline_asm_elementwise(WRITE, "=r,l,l,l,r", [address, low, high, inside.to(tl.int32)], tl.int32, False, 1)
    else:
        words = address.to(tl.pointer_type(tl.int64))
        tl.store(words, low, mask=inside)
        tl.store(words + 1, high, mask=inside)


@triton.jit
def slot_of(group_ptr, owner, source, exchange, lane, RANKS: tl.constexpr):
    """Return the addresses of the lanes that `source` sends to `owner` in this program's exchange of this number.

    Lanes beyond those of a chunk are sent in the next exchange.
    """
    if lane.shape[0] > SLOT_LANES:
        exchange = exchange + lane // SLOT_LANES
        lane = lane % SLOT_LANES
    memory = tl.load(group_ptr + PEERS_AT + owner)
    slot = (tl.program_id(0) * SLOT_COUNT + (exchange & (SLOT_COUNT - 1))) * RANKS + source
    return memory + FIRST_SLOT + slot.to(tl.int64) * SLOT_BYTES + lane * LANE_BYTES


@triton.jit
def send(address, low, high, inside, ASSEMBLY: tl.constexpr):
    """Write lanes to another rank's memory. No word may have all bits set."""
    if ASSEMBLY:
        tl.inline_asm_elementwise(SEND, "=r,l,l,l,r", [address, low, high, inside.to(tl.int32)], tl.int32, False, 1)
    else:
        write_lane(address, low, high, inside, False)


@triton.jit
def receive(address, inside, group_ptr, ASSEMBLY: tl.constexpr):
    """Wait for lanes of this rank's memory, empty them, and return their words; anything once the group has ended."""
    limit = tl.load(group_ptr + LIMIT_AT)
    if ASSEMBLY:
        ended = (group_ptr + ENDED_AT).to(tl.int64)
        status = tl.load(group_ptr + STATUS_AT)
        return tl.inline_asm_elementwise(
            RECEIVE, "=&l,=&l,l,r,l,l,l", [address, inside.to(tl.int32), ended, status, limit], (tl.int64, tl.int64),
            False, 1,
        )  # fmt: skip
    else:
        low, high = read_lane(address, inside, False)
        reads = limit * 0
        while (tl.max(((low == -1) | (high == -1)).to(tl.int32)) > 0) & (reads < limit):
            low, high = read_lane(address, inside, False)
            reads += 1
        if reads == limit:
            tl.store(group_ptr + ENDED_AT, limit * 0 + 1)
        write_lane(address, tl.full(low.shape, -1, tl.int64), tl.full(low.shape, -1, tl.int64), inside, False)
        return low, high


@triton.jit
def first_exchange(group_ptr):
    """Return the number of this program's next exchange."""
    return tl.load(group_ptr.to(tl.pointer_type(tl.int32)) + FIRST_COUNTER // 4 + tl.program_id(0))


@triton.jit
def is_running(group_ptr):
    """Return 1 until the group has ended, then 0."""
    return (tl.load(group_ptr + ENDED_AT) == 0).to(tl.int32)


@triton.jit
def order_exchanges(exchange, ASSEMBLY: tl.constexpr):
    """Order all lanes emptied and received so far by this program before those that it sends from now on.

    With SLOTS = 8, this is needed after every second exchange of a kernel: the lanes of exchange n are then empty
    before this rank sends exchange n + 2, and the other rank receives that, and calls this, before it sends n + 4. If
    a kernel sends one exchange ahead, these are n + 3 and n + 6; if it sends two ahead, and calls this after every
    second one, they are n + 4 and n + 8.
    """
    tl.debug_barrier()
    if ASSEMBLY:
        tl.inline_asm_elementwise(FENCE, "=r,r", [exchange], tl.int32, False, 1)
    tl.debug_barrier()


@triton.jit
def end_exchanges(group_ptr, exchange):
    """Store the number of this program's next exchange, for the next kernel."""
    tl.debug_barrier()  # every thread has read the counter
    tl.store(group_ptr.to(tl.pointer_type(tl.int32)) + FIRST_COUNTER // 4 + tl.program_id(0), exchange)
