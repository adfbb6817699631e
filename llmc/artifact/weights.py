"""Streams the evaluated weights graph into safetensors files, in blocks on two threads, hashing on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

import numpy as np
from llmc_runtime.format.hashing import BlockHasher
from llmc_runtime.format.manifest import WeightFile
from llmc_runtime.format.safetensors import PAD, TensorInfo, plan

from llmc.artifact.files import Files
from llmc.diagnostics import Diagnostic
from llmc.ir.graph import Graph, Value
from llmc.ir.weight_eval import Blocks, WeightSource, shape_of

ROW_BLOCK_BYTES = 1 << 20  # bytes of a row block: it and its float form fit the cache
SHARD_BYTES = 4 << 30  # maximum bytes of a file, unless one tensor is larger
THREADS = 2

Progress = Callable[[int, int], None]  # (bytes written, bytes in total)


def weight_shapes(graph: Graph) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Return (name, dtype, shape, bytes) of every output in order; raises Diagnostic E124 for a repeated name."""
    out = [(v.name, v.type.dtype, shape_of(v), v.type.nbytes.const or 0) for v in graph.outputs]
    seen: set[str] = set()
    for name, *_ in out:
        if name in seen or not name:
            cause = f"two outputs named {name!r}" if name else "an output without a name"
            raise Diagnostic("E124", f"the weights graph has {cause}", "give every output a different name")
        seen.add(name)
    return out


def write_weights(
    graph: Graph, source: WeightSource, files: Files, folder: str = "weights", progress: Progress | None = None
) -> tuple[WeightFile, ...]:
    """Evaluate the outputs of `graph` into `folder`/00000.safetensors and so on, below `files.root`.

    Peak memory, besides mapped files: a few blocks of `ROW_BLOCK_BYTES` bytes, and one whole tensor if an op needs it.
    """
    values = {v.name: v for v in graph.outputs}
    blocks = Blocks(graph, source)
    shapes = weight_shapes(graph)
    total, done, out = sum(t[3] for t in shapes), 0, []
    with ThreadPoolExecutor(THREADS) as pool:
        for index, shard in enumerate(_shards(shapes)):
            prefix, places, size = plan(shard)
            hasher = BlockHasher()
            name = f"{folder}/{index:05d}.safetensors"
            with files.create(name) as write:
                for piece in chain((memoryview(prefix),), _pieces(blocks, places, values, pool)):
                    hasher.update(piece)
                    write(piece)
                    done += len(piece)
                    if progress:
                        progress(min(done, total), total)
            out.append(WeightFile(name, size, hasher.finish()))
    return tuple(out)


def _shards(
    shapes: Sequence[tuple[str, str, tuple[int, ...], int]],
) -> Iterator[list[tuple[str, str, tuple[int, ...], int]]]:
    """Group the tensors, in order, into files of at most SHARD_BYTES bytes."""
    shard: list[tuple[str, str, tuple[int, ...], int]] = []
    size = 0
    for t in shapes:
        if shard and size + t[3] > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(t)
        size += t[3]
    if shard:
        yield shard


def _pieces(
    blocks: Blocks, places: Sequence[TensorInfo], values: dict[str, Value], pool: ThreadPoolExecutor
) -> Iterator[memoryview]:
    """Yield the bytes of all places in order, computed ahead by the pool.

    A value that is kept whole is computed while no others are in progress, to limit memory.
    """
    ahead: deque[Future[memoryview]] = deque()

    def rest() -> Iterator[memoryview]:
        """Yield what is in progress, and release the memory of the values."""
        while ahead:
            yield ahead.popleft().result()
        blocks.forget()

    for place in places:
        if place.name.startswith(PAD):
            ahead.append(pool.submit(memoryview, bytes(place.nbytes)))
            continue
        v = values[place.name]
        is_kept_whole = blocks.caches_large_value(v)
        if is_kept_whole:
            yield from rest()
        for lo, hi in _ranges(v):
            ahead.append(pool.submit(_block, blocks, v, lo, hi))
            while len(ahead) > THREADS:
                yield ahead.popleft().result()
        if is_kept_whole:
            yield from rest()
    yield from rest()


def _ranges(v: Value) -> Iterator[tuple[int, int]]:
    """Yield row ranges of about `ROW_BLOCK_BYTES` bytes; a rank-0 value is one range."""
    if v.type.rank == 0:
        yield 0, 1
        return
    rows = shape_of(v)[0]
    step = max(1, ROW_BLOCK_BYTES * rows // max(1, v.type.nbytes.const or 1))
    for lo in range(0, rows, step):
        yield lo, min(lo + step, rows)


def _block(blocks: Blocks, v: Value, lo: int, hi: int) -> memoryview:
    rows = blocks.rows(v, lo, hi) if v.type.rank else blocks.whole(v)
    return memoryview(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
