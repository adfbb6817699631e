"""Time both methods of uploading weights, with and without hashing, and hashing, copying and mapping alone.

    python -m bench.gpu.upload GiB [--threads 4,8,16] [--spans 16,64,256] [--rounds 3] [--dir DIR] [--json FILE]

A file of random bytes is written first, so that it is in the page cache. GB/s are 1e9 bytes a second, medians.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from llmc_runtime.device.cuda.cuda_device import CudaDevice
from llmc_runtime.device.gpu import upload_work, weight_upload
from llmc_runtime.device.gpu.device_memory import Pinned
from llmc_runtime.device.gpu.upload_work import BlockQueue
from llmc_runtime.device.gpu.weight_upload import Refused
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import TargetInfo, WeightFile

from bench.gpu.card import why_no_gpu

BLOCK = 16 << 20
MIB = 1 << 20
Row = dict[str, Any]


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


class Bench:
    """A device with memory for one file, and that file."""

    def __init__(self, folder: Path, nbytes: int, rounds: int) -> None:
        self.folder, self.nbytes, self.rounds = folder, nbytes, rounds
        arch = the_arch()
        self.device = CudaDevice(TargetInfo(f"cuda:{arch}", arch, ()))
        self.target = self.device.alloc(nbytes).address
        rng = np.random.default_rng()
        self.data = rng.integers(0, 1 << 63, -(-nbytes // 8), np.uint64).view(np.uint8)[:nbytes]
        (folder / "a").write_bytes(self.data.data)
        self.file = WeightFile("a", nbytes, tuple(self.hashes(self.device.threads)), BLOCK)

    def hashes(self, threads: int) -> list[str]:
        """Hash all blocks from ordinary memory."""
        pieces = [self.data[at : at + BLOCK].data for at in range(0, self.nbytes, BLOCK)]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(lambda x: hashlib.sha256(x).hexdigest(), pieces))

    def rate(self, run: Callable[[], object], nbytes: int) -> float:
        """Return the GB/s of the median round."""
        return nbytes / 1e9 / statistics.median(seconds(run) for _ in range(self.rounds))

    def floors(self, threads: list[int], spans: list[int]) -> Iterator[Row]:
        """Return the rates of the single steps of an upload."""
        for n in dict.fromkeys((1, *threads)):
            yield row("floor: sha256, plain memory", n, None, [self.rate(lambda n=n: self.hashes(n), self.nbytes)])  # type: ignore[misc]
        yield row("floor: copy, pinned memory", 1, None, [self.copy()])
        for n in threads:
            yield row("floor: pages mapped", n, None, [self.rate(lambda n=n: self.map(n), self.nbytes)])  # type: ignore[misc]
        for span in spans:
            for way, rates in self.registering(span * MIB).items():
                yield row(f"floor: {way}", 1, span, rates)

    def copy(self) -> float:
        pinned = Pinned(self.device._cuda, min(256 * MIB, self.nbytes))
        pinned.array[:] = self.data[: len(pinned.array)]
        rate = self.rate(lambda: self.send(pinned.address, len(pinned.array)), len(pinned.array))
        pinned.free()
        return rate

    def send(self, address: int, nbytes: int) -> None:
        cuda, stream = self.device._cuda, self.device._stream
        cuda.ok(cuda.cu.cuMemcpyHtoDAsync(self.target, address, nbytes, stream))
        cuda.ok(cuda.cu.cuStreamSynchronize(stream))

    def map(self, threads: int) -> None:
        """Read all pages into a new mapping, and unmap them."""
        work = BlockQueue(Folder(self.folder), [self.file], mapped=True)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda block: len(work.load(block)), work.blocks))
            list(pool.map(work.drop, dict.fromkeys(b.span for b in work.blocks)))
        work.close()

    def registering(self, nbytes: int) -> dict[str, list[float]]:
        """Return the GB/s of registering a mapped span, copying from it, and unregistering it; nothing if it is
        refused.
        """
        upload_work.SPAN_BYTES = nbytes
        work = BlockQueue(Folder(self.folder), [self.file], mapped=True)
        try:
            span = work.blocks[0].span
            for block in work.blocks:
                if block.span is span:
                    work.load(block)
            rounds = [self.register(*work.location(span)) for _ in range(self.rounds)]
        except Refused as why:
            print(f"refused: {why}", flush=True)
            return {}
        finally:
            work.close()
        return dict(zip(("register", "copy, registered", "unregister"), map(list, zip(*rounds))))

    def register(self, address: int, nbytes: int) -> tuple[float, float, float]:
        cuda = self.device._cuda
        begin = time.perf_counter()
        if why := cuda.register(address, nbytes):
            raise Refused(why)
        registering = time.perf_counter() - begin
        copying = seconds(lambda: self.send(address, min(nbytes, self.nbytes)))
        ending = seconds(lambda: cuda.ok(cuda.cu.cuMemHostUnregister(address)))
        return nbytes / 1e9 / registering, nbytes / 1e9 / copying, nbytes / 1e9 / ending

    def uploads(self, threads: list[int], spans: list[int]) -> Iterator[Row]:
        """Measure every method of uploading, as when an artifact is opened."""
        for check in (True, False):
            for way in (weight_upload.MAPPED, weight_upload.PINNED):
                for span in spans if way == weight_upload.MAPPED else (None,):
                    for n in threads:
                        yield self.upload(check, way, span, n)

    def upload(self, check: bool, way: str, span: int | None, threads: int) -> Row:
        if span:
            upload_work.SPAN_BYTES = span * MIB
        args = (self.device._cuda, self.device._enter, Folder(self.folder), [self.file], {"a": self.target})
        uploads = [weight_upload.upload(*args, check=check, threads=threads, method=way) for _ in range(self.rounds)]
        name = f"{uploads[-1].method}, {'hashed' if check else 'not hashed'}"
        return row(name, uploads[-1].threads, span, [f.rate / 1e9 for f in uploads], uploads[-1].fallback_reason)


def row(name: str, threads: int, span: int | None, rates: list[float], why: str = "") -> Row:
    """`span` in MiB; `gb_s` the median of `all`."""
    rates = [round(r, 2) for r in rates]
    return {"what": name, "threads": threads, "span": span, "gb_s": statistics.median(rates), "all": rates, "why": why}


def the_arch() -> str:
    from cuda.bindings import driver

    driver.cuInit(0)
    kind = driver.CUdevice_attribute
    which = (kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    return "sm_{}{}".format(*(driver.cuDeviceGetAttribute(w, 0)[1] for w in which))


def show(row: Row) -> None:
    span = f"{row['span']} MiB" if row["span"] else ""
    rates = " ".join(f"{x:.1f}" for x in row["all"])
    print(f"{row['what']:28} {row['threads']:3} {span:>8} {row['gb_s']:8.1f}   {rates} {row['why']}", flush=True)


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main(argv: list[str]) -> int:
    ap = argparse.ArgumentParser(prog="python -m bench.gpu.upload", description=__doc__.partition("\n")[0])
    ap.add_argument("gib", type=float, metavar="GiB", help="size of the file in GiB")
    ap.add_argument("--threads", type=numbers, default=[4, 8, 16])
    ap.add_argument("--spans", type=numbers, default=[16, 64, 256], help="sizes registered in one call, in MiB")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--dir", type=Path, help="folder of the file (default: a new temporary folder)")
    ap.add_argument("--json", type=Path, help="file of the rows as JSON (default: print them)")
    args = ap.parse_args(argv)
    if why := why_no_gpu():
        print(f"no GPU: {why}", file=sys.stderr)
        return 3
    rows = []
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        bench = Bench(Path(folder), int(args.gib * (1 << 30)), args.rounds)
        print(f"{bench.device.name}, {args.gib} GiB, {bench.device.threads} threads by default")
        print(f"{'':27} threads     span     GB/s   each")
        for part in (bench.floors, bench.uploads):
            for row in part(args.threads, args.spans):
                rows.append(row)
                show(row)
        bench.device.close()
    text = json.dumps({"device": bench.device.name, "bytes": bench.nbytes, "rows": rows})
    if args.json:
        args.json.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
