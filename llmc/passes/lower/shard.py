"""Divides a model over several ranks: each computes with its part of the weights and heads (tensor parallelism).

The pass has four steps, each in a module of its own:

1. `shard_siblings` separates what one product computes for several readers.
2. `shard_recurrences` rewrites what follows a recurrence, so that its heads divide.
3. `shard_plan` decides which values are divided, by the rules of each op in `shard_rules`.
4. `shard_apply` replaces the nodes by nodes over parts, and adds the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from llmc_runtime.format.names import NCCL
from llmc_runtime.format.program import RANK

from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Module
from llmc.passes.base import Ctx, Pass
from llmc.passes.fuse.fuse_reduce import FuseReduce
from llmc.passes.fuse.fuse_reduce_norm import FuseReduceNorm
from llmc.passes.lower.gather_first import GatherFirst
from llmc.passes.lower.shard_apply import apply_plan
from llmc.passes.lower.shard_plan import make_plans
from llmc.passes.lower.shard_recurrences import divide_heads
from llmc.passes.lower.shard_siblings import separate
from llmc.passes.pipeline import require
from llmc.passes.weights.quantize import Quantize
from llmc.targets.target import Target

BEHIND_SUMS = ("fuse-norm-linear", "fuse-norm-quantized", "select")  # the first of these follows fuse-reduce-norm


@dataclass(frozen=True)
class Shard(Pass):
    """Divide the graphs over ranks, which are the values of the symbol K (tensor parallelism).

    Attention and the KV pools are divided by heads; if there are fewer KV heads than ranks, ranks share them. Pools of
    latents are whole on every rank. Recurrences and their states are divided by heads, convolutions by channels.

    Products before attention, and the first products of an MLP or of experts, are divided by columns. The products
    after them are divided by rows, followed by an all_reduce. The output projection is divided by columns, followed by
    an all_gather; embeddings by rows, followed by an all_reduce. Norms, routers and small tables are whole on every
    rank.

    The parts of a weight are slices that begin at a multiple of K. Columns, and rows of tables, that do not divide are
    padded with zeros. The pass runs after page-attention and before fuse-linear; `--explain` names what stays whole.

    ranks: number of ranks.
    group: columns to which `quantize` will give one scale; 0 or 1 if there are none. Every part of an MLP or an expert
      gets a multiple of it if the whole has one.
    """

    name: ClassVar[str] = "shard"
    ranks: int = 1
    group: int = 0

    def run(self, m: Module, ctx: Ctx) -> int:
        """Divide every launched graph; return the number of changes."""
        if self.ranks < 1:
            raise Diagnostic("E421", f"pass shard: ranks={self.ranks} is not a number of ranks", "use 1 or more")
        if self.ranks == 1 or not ctx.spend():
            return 0
        if RANK in m.symbols:
            raise Diagnostic("E437", f"the module is sharded already: it has a symbol {RANK}", "run shard only once")
        m.symbols[RANK] = (0, self.ranks - 1)
        graphs = m.launched
        done = sum(separate(g, ctx) + divide_heads(g, self.ranks, ctx) for g in graphs)
        for g, plan in make_plans(graphs, self.ranks, ctx, max(1, self.group)):
            done += apply_plan(g, plan, self.ranks, ctx)
        if not done:
            del m.symbols[RANK]
        return done


def with_ranks(passes: Sequence[Pass], ranks: int, target: Target) -> list[Pass]:
    """Return the passes with `shard` after page-attention if there are several ranks.

    On GPUs, `fuse-reduce` follows it, and `fuse-reduce-norm` precedes the passes that fuse norms into products, unless
    the target is deterministic: the final norm follows a sum in the graphs of decoding only. With NCCL, `gather-first`
    takes the place of both.

    Raises Diagnostic E421 if the passes lack page-attention, and E439 if they have `shard` already, or if ranks on the
    target are not supported.
    """
    if any(isinstance(p, Shard) for p in passes):
        remedy = "leave it out of --pipeline and use --tensor-parallel-size; llmc opt runs it"
        raise Diagnostic("E439", "the pipeline has the pass shard", remedy)
    if ranks == 1:
        return list(passes)
    if target.family not in ("cpu", "cuda"):
        cause = f"tensor_parallel_size = {ranks} for {target.name}: ranks on AMD GPUs are not supported"
        raise Diagnostic("E439", cause, "compile for a CPU or an NVIDIA GPU, or without --tensor-parallel-size")
    require(passes, "page-attention", "--tensor-parallel-size")
    at = next(i for i, p in enumerate(passes) if p.name == "page-attention")
    group = next((p.columns for p in passes if isinstance(p, Quantize)), 0)
    front = [*passes[: at + 1], Shard(ranks=ranks, group=group)]
    back = list(passes[at + 1 :])
    if NCCL in target.languages:
        front.append(GatherFirst())
    elif target.family == "cuda":
        front.append(FuseReduce())
        if not target.deterministic:
            end = next((i for i, p in enumerate(back) if p.name in BEHIND_SUMS), len(back))
            back.insert(end, FuseReduceNorm())
    return front + back
