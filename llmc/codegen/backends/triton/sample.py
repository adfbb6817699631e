"""Sampling kernels: biases, penalties, masks, the random draw and log-probabilities.

The kernels are in `kernels/sample.py`, `kernels/row_logits.py` and `kernels/logprobs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from llmc.codegen.backends.triton.template import Argument, Template, record
from llmc.codegen.backends.triton.tiling import next_power_of_2
from llmc.codegen.backends.triton.triton_kernel import Code, TritonKernel, Unit, unsupported
from llmc.codegen.kernel import BY_SCHEDULE, Schedule
from llmc.ir.dtype import FLOATS
from llmc.ir.graph import Node
from llmc.targets.target import Target

BLOCK_US = 1.5  # microseconds of a program with few loads

# The operands of row_block_max, which are the first ones of row_sample_blocks and row_finish.
TABLES = (
    "logits_ptr rows_ptr starts_ptr positions_ptr floats_ptr ints_ptr stops_ptr seen_ptr counts_ptr bias_ids_ptr "
    "biases_ptr allowed_ptr"
)
RESULTS = "logprob_ptr rank_ptr ids_ptr logprobs_ptr"  # of row_logprobs


def vocabulary(node: Node) -> int:
    """Return the number of columns of the logits."""
    return int(node.operands[0].type.shape[1])


def width(node: Node, operand: int) -> int:
    """Return the number of columns of an operand."""
    return int(node.operands[operand].type.shape[1])


def tables(u: Unit, **changed: Argument) -> str:
    """Return the argument for the state of all rows: the operands TABLES, except for pointers in `changed`."""
    n, words = u.node, width(u.node, 7)
    sizes = {"VOCAB": vocabulary(n), "WORDS": words, "MASKS": width(n, 11) // words}
    sizes |= {"STOPS": width(n, 6), "BIASES": width(n, 9)}
    return record("RowTables", **{**u.pointers(TABLES, ""), **changed}, **sizes)


def results(u: Unit, names: str) -> str:
    """Return the argument for the results of the template; `names` are those of the node's results, see `pointers`."""
    k = int(u.node.attrs["k"])
    return record("LogprobResults", **u.pointers("", names), COUNT=k, COUNT_PADDED=next_power_of_2(k))


def too_few(node: Node) -> str | None:
    """Return why the row is too short for k likeliest ids, or None."""
    v, k = node.operands[0].type.shape[1], node.attrs["k"]
    return f"the {k} likeliest of {v} ids" if v.const is None or v.const < k else None


class Sampling(TritonKernel):
    """Base class: a vocabulary of constant size, floats and 32-bit integers."""

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        if node.operands[0].type.shape[1].const is None:
            return "the size of the vocabulary is not constant"
        return unsupported(node, (*FLOATS, "i32"))


def _programs_us(node: Node, ids: int, per: int, target: Target, env: Mapping[str, int]) -> float:
    """Predict the microseconds of reading the logits with programs of `per` blocks of `ids` ids.

    The larger of the traffic and of waves of programs (8 at a time on a multiprocessor), each of which waits for memory
    a few times, less often for the blocks after its first.
    """
    rows = node.operands[0].type.shape[0].subs(env).const or 1
    v = vocabulary(node)
    nbytes = rows * v * (2 if node.operands[0].type.dtype != "f32" else 4)
    waves = -(-rows * -(-v // (per * ids)) // (8 * max(1, target.limits.units)))
    program_us = BLOCK_US + 0.4 * (per - 1) + ids / 8192
    return max(nbytes / target.bandwidth * 1e6, waves * program_us) + target.launch_us


class Penalize(Sampling):
    """row_penalize, one program per block of a row. In place, rows without penalties return at once."""

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),) if node.operands[0].type.dtype == "f32" else ()

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"block": 1024, "warps": 4}, {"block": 2048, "warps": 8}]

    def code(self, u: Unit) -> Code:
        n, block = u.node, u.schedule.get("block", 1024)
        rows, v = n.operands[0].type.shape
        return u.launch(
            Template("row_logits", "row_penalize"),
            (v.ceildiv(block), rows),
            **u.pointers(
                "logits_ptr rows_ptr floats_ptr ints_ptr seen_ptr counts_ptr bias_ids_ptr biases_ptr starts_ptr "
                "positions_ptr token_ids_ptr",
                "out_ptr",
            ),
            max_length=u.sizes(n.operands[10].type.shape[1]) if len(n.operands) > 8 else 0,
            VOCAB=int(v),
            WORDS=width(n, 4),
            BIASES=width(n, 6),
            BLOCK=block,
            MAY_BE_IN_PLACE=bool(self.inplace(n, u.schedule)),
        )

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return _programs_us(node, schedule["block"], 1, target, env)


class Mask(Sampling):
    """row_mask, one program per row; in place, it writes only the masked ids."""

    def inplace(self, node: Node, schedule: Schedule) -> tuple[tuple[int, int], ...]:
        return ((0, 0),)

    def code(self, u: Unit) -> Code:
        n = u.node
        stops = width(u.node, 5)
        words = -(-vocabulary(u.node) // 32)
        return u.launch(
            Template("row_logits", "row_mask"),
            (n.operands[0].type.shape[0],),
            4,
            **u.pointers("logits_ptr rows_ptr starts_ptr positions_ptr ints_ptr stops_ptr allowed_ptr", "out_ptr"),
            VOCAB=vocabulary(n),
            WORDS=words,
            MASKS=width(n, 6) // words,
            STOPS=stops,
            STOPS_PADDED=next_power_of_2(stops),
            TILE=4096,
        )

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return target.launch_us + BLOCK_US


class BlockMax(Sampling):
    """row_block_max: a program summarizes `per` blocks of a row."""

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"per": per, "warps": 4} for per in (1, 2, 4, 8)]

    def reject(self, node: Node, target: Target) -> str | None:
        block = node.attrs["block"]
        if block != next_power_of_2(block):
            return f"block={block} is not a power of two"
        return super().reject(node, target)

    def code(self, u: Unit) -> Code:
        n, per = u.node, u.schedule.get("per", 1)
        rows, blocks = n.results[0].type.shape
        return u.launch(
            Template("sample", "row_block_max"),
            (blocks.ceildiv(per), rows),
            tables=tables(u),
            summaries=record("BlockSummaries", **u.pointers("", "best_ptr drawn_ptr scores_ptr"), BLOCKS=int(blocks)),
            BLOCK=n.attrs["block"],
            BLOCKS_PER_PROGRAM=per,
        )

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        return _programs_us(node, node.attrs["block"], schedule["per"], target, env)


class Draws(Sampling):
    """Base class: one program draws from a row, and reads `tile` ids at a time if it has to read the row."""

    greedy_us = 2.0  # microseconds of a greedy row

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"tile": 4096, "warps": 16}, {"tile": 4096, "warps": 8}]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the time of greedy rows; schedules with more warps, faster for other rows, rank first."""
        rows = node.operands[0].type.shape[0].subs(env).const or 1
        waves = -(-rows // max(1, target.limits.units))
        return target.launch_us + waves * (self.greedy_us + 0.5 * 16 / schedule["warps"])

    def tiles(self, u: Unit) -> dict[str, Argument]:
        """Return the template arguments of a draw."""
        v = vocabulary(u.node)
        tile = min(int(u.schedule.get("tile", 4096)), max(16, next_power_of_2(v)))
        return {"LOG_VOCAB": math.log(v), "TILE": tile, "TILES_PADDED": max(2, next_power_of_2(-(-v // tile)))}


class SampleBlocks(Draws):
    """row_sample_blocks: rows without filters read only the summaries of the blocks."""

    def code(self, u: Unit) -> Code:
        return self.draw(u, "row_sample_blocks", tables=tables(u), token_ids_ptr="x12")

    def draw(self, u: Unit, function: str, **arguments: Argument) -> Code:
        """Return the code of a template whose programs draw from the summaries of the blocks."""
        n, blocks = u.node, width(u.node, 13)
        pointers = {"best_ptr": "x13", "drawn_ptr": "x14", "scores_ptr": "x15"}
        return u.launch(
            Template("sample", function),
            (n.operands[0].type.shape[0],),
            u.schedule.get("warps", 16),
            **arguments,
            summaries=record("BlockSummaries", **pointers, BLOCKS=blocks),
            out_ptr="y0",
            max_length=u.sizes(n.operands[12].type.shape[1]),
            options=record("DrawOptions", **self.tiles(u), BLOCKS_PADDED=next_power_of_2(blocks)),
        )


class Finish(SampleBlocks):
    """row_finish: draw, log-probabilities and commit, one program per row."""

    greedy_us = 2.5

    def reject(self, node: Node, target: Target) -> str | None:
        return too_few(node) or super().reject(node, target)

    def code(self, u: Unit) -> Code:
        v = vocabulary(u.node)
        tile = min(8192, next_power_of_2(v))
        states = u.pointers("", "- - - - - token_ids_ptr length_ptr counts_ptr")  # the next versions, in place
        return self.draw(
            u,
            "row_finish",
            tables=tables(u, counts_ptr=states["counts_ptr"]),
            token_ids_ptr=states["token_ids_ptr"],
            length_ptr=states["length_ptr"],
            emit_ptr="x17",
            logprobs=results(u, f"- {RESULTS}"),
            entry_count=u.sizes(u.node.operands[1].type.shape[0]),
            LOGPROBS_TILE=tile,
            LOGPROBS_TILES_PADDED=next_power_of_2(-(-v // tile)),
        )


class Sample(Draws):
    """row_sample, one program per row."""

    greedy_us = 12.0

    def code(self, u: Unit) -> Code:
        return u.launch(
            Template("sample", "row_sample"),
            (u.node.operands[0].type.shape[0],),
            u.schedule.get("warps", 16),
            **u.pointers("logits_ptr rows_ptr starts_ptr positions_ptr token_ids_ptr floats_ptr ints_ptr", "out_ptr"),
            max_length=u.sizes(u.node.operands[4].type.shape[1]),
            VOCAB=vocabulary(u.node),
            **self.tiles(u),
        )


class Logprobs(TritonKernel):
    """row_logprobs, one program per entry; without the operand `rows`, all entries are computed.

    Rows that did not request log-probabilities return at once.
    """

    constant_reduction_order = BY_SCHEDULE

    def reject(self, node: Node, target: Target) -> str | None:
        if len(node.operands) == 3:
            return "the operand iparams is missing"
        return too_few(node) or unsupported(node, (*FLOATS, "i32"))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"tile": 8192, "warps": 16}, {"tile": 4096, "warps": 8}]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Predict the time of rows without log-probabilities; wider tiles, faster for the others, rank first."""
        return target.launch_us + 1.0 + 0.1 * 8192 / schedule["tile"]

    def code(self, u: Unit) -> Code:
        rows, columns = u.node.operands[0].type.shape
        v = int(columns)
        tile = min(int(u.schedule.get("tile", 8192)), next_power_of_2(v))
        return u.launch(
            Template("logprobs", "row_logprobs"),
            (rows,),
            u.schedule.get("warps", 16),
            **u.pointers("logits_ptr drawn_ptr rows_ptr ints_ptr", ""),
            results=results(u, RESULTS),
            VOCAB=v,
            TILE=tile,
            TILES_PADDED=next_power_of_2(-(-v // tile)),
        )


ROW_PENALIZE = Penalize("triton/row_penalize", ("row_penalize",), "triton")
ROW_MASK = Mask("triton/row_mask", ("row_mask",), "triton")
ROW_BLOCK_MAX = BlockMax("triton/row_block_max", ("row_block_max",), "triton")
ROW_SAMPLE_BLOCKS = SampleBlocks("triton/row_sample_blocks", ("row_sample_blocks",), "triton")
ROW_FINISH = Finish("triton/row_finish", ("row_finish",), "triton")
ROW_SAMPLE = Sample("triton/row_sample", ("row_sample",), "triton")
ROW_LOGPROBS = Logprobs("triton/row_logprobs", ("row_logprobs",), "triton")
