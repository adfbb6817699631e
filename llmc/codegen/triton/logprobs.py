"""Log-probabilities of drawn ids and of the likeliest: one program a row, which ends at once where none are wanted."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.codegen.kernel import Schedule
from llmc.codegen.triton.base import FLOATS, Code, TritonKernel, Unit, unsupported
from llmc.codegen.triton.draw import KEYS
from llmc.codegen.triton.tiles import power
from llmc.ir.graph import Node
from llmc.targets.target import Target

NOTHING = -(2**63)  # below every packed key

# `most` holds, for each of TILE lanes, the largest id not yet told among the ids of that lane (id % TILE): the next one
# told is the largest lane's, which then looks its ids through for the one below.
_TOLD = """\
@triton.jit
def told(x, drawn, wanted):
    # (log-probability and rank of the drawn id, the likeliest ids and theirs); zeros where not wanted.
    k = tl.arange(0, {kp})
    ids = tl.zeros([{kp}], tl.int32)
    tops = tl.zeros([{kp}], tl.float32)
    logprob = tl.zeros([], tl.float32)
    rank = tl.zeros([], tl.int32)
    if wanted:
        own = tl.load(x + drawn).to(tl.float32)
        lanes = tl.arange(0, {tile})
        most = tl.full([{tile}], {nothing}, tl.int64)
        larger = tl.zeros([{tile}], tl.int32)
        for at in range(0, {v}, {tile}):
            v = tl.load(x + at + lanes, mask=at + lanes < {v}, other=float("-inf")).to(tl.float32)
            here = packed(tl.where(at + lanes < {v}, key_of(v), LOWEST), at + lanes)
            most = tl.maximum(most, here)
            larger += (v > own).to(tl.int32)
        top = value_of(packed_key(tl.max(most, 0)))
        total = tl.zeros([{tile}], tl.float64)
        for at in range(0, {v}, {tile}):
            v = tl.load(x + at + lanes, mask=at + lanes < {v}, other=float("-inf")).to(tl.float32)
            total += tl.exp(v - top).to(tl.float64)
        shift = tl.log(tl.sum(total, 0)).to(tl.float32)
        logprob = (own - top) - shift
        rank = tl.sum(larger, 0) + 1
        for n in range({k}):
            best = tl.max(most, 0)
            id = packed_id(best)
            ids = tl.where(k == n, id, ids)
            tops = tl.where(k == n, (value_of(packed_key(best)) - top) - shift, tops)
            j = id % {tile} + tl.arange(0, {tiles}) * {tile}
            v = tl.load(x + j, mask=j < {v}, other=0.0).to(tl.float32)
            here = packed(key_of(v), j)
            here = tl.where((j < {v}) & (here < best), here, {nothing})
            most = tl.where(lanes == id % {tile}, tl.max(here, 0), most)
    return logprob, rank, ids, tops
"""
_STORES = """\
k = tl.arange(0, {kp})
tl.store(y{first} + i, logprob)
tl.store(y{second} + i, rank)
tl.store(y{third} + i * {k} + k, ids, mask=k < {k})
tl.store(y{fourth} + i * {k} + k, tops, mask=k < {k})"""
_BODY = """\
i = tl.program_id(0)
{wait}
{wants}
logprob, rank, ids, tops = told(x0 + i.to(tl.int64) * {v}, tl.load(x1 + i), wants)
{stores}"""

_WANTS = """\
row = tl.load(x2 + i).to(tl.int64)
wants = (row >= 0) & (tl.load(x3 + tl.maximum(row, 0) * 8 + 5) != 0)"""


def told(v: int, k: int, tile: int) -> str:
    """The helper `told` over rows of v logits, `tile` at a time; it needs KEYS."""
    return _TOLD.format(v=v, k=k, kp=power(k), tile=tile, tiles=power(-(-v // tile)), nothing=NOTHING)


def stores(first: int, k: int) -> str:
    """Statements that store what `told` gave row i, to results from `first` on."""
    return _STORES.format(k=k, kp=power(k), first=first, second=first + 1, third=first + 2, fourth=first + 3)


def too_few(node: Node) -> str | None:
    """Why the row is too short to have k likeliest ids, or None."""
    v, k = node.operands[0].type.shape[1], node.attrs["k"]
    return f"{k} of {v} ids" if v.const is None or v.const < k else None


class Logprobs(TritonKernel):
    """row_logprobs by rows; without `rows` every row wants them."""

    def reject(self, node: Node, target: Target) -> str | None:
        if len(node.operands) == 3:
            return "rows without iparams"
        return too_few(node) or unsupported(node, (*FLOATS, "i32"))

    def schedules(self, node: Node, target: Target) -> list[Schedule]:
        return [{"tile": 8192, "warps": 16}, {"tile": 4096, "warps": 8}]

    def cost_us(self, node: Node, schedule: Schedule, target: Target, env: Mapping[str, int]) -> float:
        """Of rows that want none; wider tiles first, for the others."""
        return target.launch_us + 1.0 + 0.1 * 8192 / schedule["tile"]

    def code(self, u: Unit) -> Code:
        rows, columns = u.node.operands[0].type.shape
        v, k = int(columns), int(u.node.attrs["k"])
        tile = min(int(u.schedule.get("tile", 8192)), power(v))
        wants = _WANTS if len(u.node.operands) == 4 else "wants = i >= 0"
        body = _BODY.format(v=v, wait=u.wait, wants=wants, stores=stores(0, k))
        return Code(body, (rows,), f"{KEYS}\n\n{told(v, k, tile)}", u.schedule.get("warps", 16))


LOGPROBS = Logprobs("triton/row_logprobs", ("row_logprobs",), "triton")
