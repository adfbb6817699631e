"""Recurrent layers on device rows in Triton: short convolutions, linear recurrences, and the log of speculation.

The kernels are in `kernels/row_conv.py`, `kernels/row_recurrence.py` and `kernels/delta_chunk.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.backends.triton.template import Template
from llmc.codegen.backends.triton.tiling import cost_us, next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, element, unsupported
from llmc.codegen.kernel import EXACT, Schedule
from llmc.ir.dim import Dim
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

CHANNELS = 256  # channels of a program of a convolution
COLUMNS = 1024  # columns of a program that writes a log
BLOCK_COLUMNS = (32, 64, 16)  # columns of the state of a program
CHUNK_COLUMNS = 32  # maximum columns of a program that computes chunks: more would spill registers, or use wgmma
MIN_DOT = 16  # the smallest size of a matrix that tl.dot takes
MAX_STATE = 1 << 14  # elements of a program's state
SMALL_STATE = 512  # elements of a state below which one warp computes it
TOKEN_US = 0.5  # microseconds of a token whose state depends on the one before
CHUNK_US = 2.5  # microseconds of a chunk


def has_single_tokens(node: Node) -> bool:
    """Return whether every entry of the node's steps has one token."""
    entries = node.operand("rows")
    assert entries is not None
    return node.operands[0].type.shape[0] == entries.type.shape[0]


class RowConv(TritonKernel):
    """row_conv: a program computes a tile of a run, or a whole run if every entry has one token."""

    constant_reduction_order = EXACT  # each output adds its terms in one order, whatever the tile
    dtypes = (*FLOATS, "i32")

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        min_tile = next_power_of_2(max(1, int(node.operands[1].type.shape[1]) - 1))
        tiles = [(1, 4), (4, 4)] if has_single_tokens(node) else [(32, 8), (16, 4)]
        return [{"tile": max(min_tile, tile), "warps": warps} for tile, warps in tiles]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        tokens, channels = node.result.type.shape if len(node.results) == 1 else node.results[0].type.shape
        programs = (tokens.ceildiv(schedule["tile"]) + 1) * channels.ceildiv(CHANNELS)
        return cost_us(node, target, env, programs, schedule["warps"])

    def code(self, u: Unit) -> Code:
        tokens, channels = u.node.operands[0].type.shape
        entries = u.node.operands[3].type.shape[0]
        ring = u.node.operands[2].type.shape[1]
        whole = has_single_tokens(u.node)
        tiles = entries + 1 if whole else tokens.ceildiv(u.schedule["tile"]) + entries + 1
        return u.launch(
            Template("row_conv", "row_conv"),
            (tiles, channels.ceildiv(CHANNELS)),
            **u.pointers("x_ptr weight_ptr - rows_ptr starts_ptr positions_ptr bias_ptr", "out_ptr ring_ptr"),
            row_count=u.sizes(entries),
            token_count=u.sizes(tokens),
            channels=u.sizes(channels),
            WIDTH=int(u.node.operands[1].type.shape[1]),
            RING=int(ring),
            RING_PADDED=next_power_of_2(int(ring)),
            TILE=u.schedule["tile"],
            CHANNELS_PER_PROGRAM=CHANNELS,
            WHOLE_RUNS=whole,
        )


class ChunkFactors(TritonKernel):
    """chunk_factors: a program has one chunk of a run and one head."""

    def reject(self, node: Node, target: Target) -> str | None:
        size = node.attrs["chunk"]
        if size < MIN_DOT or size & (size - 1):
            return f"chunks of {size} tokens, not a power of two from {MIN_DOT} on"
        return unsupported(node, (*FLOATS, "i32"), target)

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"warps": 4}, {"warps": 8}]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return cost_us(node, target, env, self._tiles(node) * node.result.type.shape[1], schedule["warps"])

    def _tiles(self, node: Node) -> Dim:
        entries = node.operand("rows")
        assert entries is not None
        return node.result.type.shape[0].ceildiv(node.attrs["chunk"]) + entries.type.shape[0] + 1

    def code(self, u: Unit) -> Code:
        k, (tokens, heads, matrices, chunk) = u.node.operands[1].type.shape, u.node.result.type.shape
        return u.launch(
            Template("delta_chunk", "chunk_factors"),
            (self._tiles(u.node), heads),
            **u.pointers("q_ptr k_ptr decay_ptr rows_ptr starts_ptr beta_ptr", "out_ptr"),
            row_count=u.sizes(u.node.operands[3].type.shape[0]),
            token_count=u.sizes(tokens),
            KEY_HEADS=int(k[1]),
            VALUE_HEADS=int(heads),
            KEY_DIM=int(k[2]),
            KEY_PADDED=max(MIN_DOT, next_power_of_2(int(k[2]))),
            MATRICES=int(matrices),
            CHUNK=int(chunk),
            CHUNK_LEVELS=int(chunk).bit_length() - 1,
            LEAST=u.node.attrs["least"],
            DOT_DTYPE=dot_dtype(u),
        )


def dot_dtype(u: Unit) -> str:
    """Return the Triton dtype of queries and keys as factors."""
    return "tl.float32" if u.interpret else element(u.node.operands[0].type)


class RowRecurrence(TritonKernel):
    """Recurrences, with or without chunks: a program has one run, one head and a block of the state's columns."""

    def reject(self, node: Node, target: Target) -> str | None:
        if next_power_of_2(int(node.operands[1].type.shape[2])) * min(BLOCK_COLUMNS) > MAX_STATE:
            return f"keys of {node.operands[1].type.shape[2]} elements"
        return unsupported(node, (*FLOATS, "i32"), target)

    def reduction_order(self, node: Node, schedule: Schedule, target: Target) -> str | None:
        """Return an order for single tokens only: the bits of a chunk depend on where it begins in a prompt."""
        return None if chunk_of(node) else f"{self.name} {schedule['block']} columns, {schedule['warps']} warps"

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        keys, width = (next_power_of_2(int(node.operands[i].type.shape[2])) for i in (1, 2))
        min_block = MIN_DOT if chunk_of(node) else 1
        blocks = dict.fromkeys(min(max(min_block, width), b) for b in BLOCK_COLUMNS if keys * b <= MAX_STATE)
        if not chunk_of(node):
            return [{"block": b, "warps": 4 if keys * b >= SMALL_STATE else 1} for b in blocks]
        few = 16 if target.family == "cuda" else 32  # columns of 4 warps
        shapes = [(b, 4 if b <= few else 8) for b in blocks if b <= CHUNK_COLUMNS]
        return [{"block": b, "warps": w, "stages": stages} for stages in (2, 1) for b, w in sorted(shapes)]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the traffic of all heads, and the latency of the longest run: all tokens but one for each entry."""
        q, _, v = (node.operands[i].type.shape for i in range(3))
        entries = node.operand("rows").type.shape[0]  # type: ignore[union-attr]
        programs = entries * v[1] * v[2].ceildiv(schedule["block"])
        tokens, rows = (d.subs(env).const or 1 for d in (q[0], entries))
        chunk = chunk_of(node)
        longest = max(1, tokens - rows + 1)
        chain = -(-longest // chunk) * CHUNK_US if chunk and longest > 1 else longest * TOKEN_US
        return chain + cost_us(node, target, env, programs, schedule["warps"])

    def code(self, u: Unit) -> Code:
        q, k, v = (u.node.operands[i].type.shape for i in range(3))
        entries, log, chunk = u.node.operand("rows"), u.node.operand("log"), chunk_of(u.node)
        assert entries is not None
        block = u.schedule["block"]
        factors = "factors_ptr " if chunk else ""
        logs = "base_ptr log_ptr " if log else ""
        operands = f"q_ptr k_ptr v_ptr decay_ptr {factors}- {logs}rows_ptr starts_ptr positions_ptr beta_ptr"
        pointers = u.pointers(operands, "out_ptr memory_ptr")
        return u.launch(
            Template("row_recurrence", "row_recurrence"),
            (entries.type.shape[0] + 1, v[1], v[2].ceildiv(block)),
            **{"factors_ptr": None, "base_ptr": None, "log_ptr": None, **pointers},
            row_count=u.sizes(entries.type.shape[0]),
            token_count=u.sizes(q[0]),
            KEY_HEADS=int(k[1]),
            VALUE_HEADS=int(v[1]),
            KEY_DIM=int(k[2]),
            VALUE_DIM=int(v[2]),
            KEY_PADDED=max(MIN_DOT if chunk else 1, next_power_of_2(int(k[2]))),
            VALUE_BLOCK=block,
            DECAYS=decays_of(u.node),
            LOG_TOKENS=int(log.type.shape[1]) if log else 0,
            CHUNK=chunk,
            LEAST=u.node.attrs.get("least", 0),
            DOT_DTYPE=dot_dtype(u),
        )


def chunk_of(node: Node) -> int:
    """Return the tokens of a chunk of the recurrence, or 0 if it computes one token after another."""
    factors = node.operand("factors")
    return int(factors.type.shape[3]) if factors else 0


def decays_of(node: Node) -> int:
    """Return the decays of a value head of the recurrence: 1, or one for each channel of a key."""
    v, decay = (node.operands[i].type.shape for i in (2, 3))
    return int(decay[1]) // int(v[1])


class RowLog(TritonKernel):
    """row_log: a program has one run and a block of the log's columns."""

    constant_reduction_order = EXACT
    dtypes = (*FLOATS, "i32")

    def _columns(self, node: Node) -> Dim:
        return node.operands[4].type.shape[2]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        programs = node.operands[5].type.shape[0] * self._columns(node).ceildiv(COLUMNS)
        return cost_us(node, target, env, programs, 4)

    def code(self, u: Unit) -> Code:
        k, v, decay, log, rows = (u.node.operands[i].type.shape for i in (0, 1, 2, 4, 5))
        return u.launch(
            Template("row_conv", "row_log"),
            (rows[0], self._columns(u.node).ceildiv(COLUMNS)),
            **u.pointers("k_ptr v_ptr decay_ptr - - rows_ptr starts_ptr positions_ptr beta_ptr", "base_ptr log_ptr"),
            row_count=u.sizes(rows[0]),
            token_count=u.sizes(k[0]),
            KEYS=int(k[1] * k[2]),
            VALUES=int(v[1] * v[2]),
            FACTORS=int(decay[1]),
            HEADS=int(v[1]),
            TOKENS=int(log[1]),
            COLUMNS=COLUMNS,
        )


ROW_CONV = RowConv("triton/row_conv", ("row_conv",))
CHUNK_FACTORS = ChunkFactors("triton/chunk_factors", ("chunk_factors",))
ROW_RECURRENCE = RowRecurrence(
    "triton/row_recurrence", ("row_recurrence", "row_recurrence_draft", "chunk_recurrence", "chunk_recurrence_draft")
)
ROW_LOG = RowLog("triton/row_log", ("row_log",))
