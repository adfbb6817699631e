"""Memory and time of compiling quantised weights: `python -m bench.compile_quantized DIR [--layers N] [--rows A,B]`.

DIR gets checkpoints of random weights in the shape of Llama-3.1-8B (30 GB with all layers), which are kept, and one
result at a time. Each row is a fresh process. Its peak is the anonymous memory of the process tree (RssAnon); the goal
is 2 GiB above the largest stored tensor. Its time is compared with the time to read the checkpoint from this disk (not
from the page cache) and to write a file of the size of the result, measured immediately before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bench import shapes
from bench.kit import Table, machine, run

GIB = 1 << 30
GROUP = 128
PIECE = 1 << 24  # bytes that are read or written at a time
BYTES = MappingProxyType({"I32": 4, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1})
LLMC = (sys.executable, "-m", "llmc.cli")
GPTQ = MappingProxyType({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True})
FP8 = MappingProxyType(
    {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint; `value` is repeated (little endian), or bytes are drawn if it is empty."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    value: bytes = b""

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return int(np.prod(self.shape)) * BYTES[self.dtype]


@dataclass(frozen=True)
class Row:
    """A command: its checkpoint (a format or bf16), and its arguments after the model's folder."""

    name: str
    checkpoint: str
    command: str
    arguments: tuple[str, ...]


_LIMITS = ("--max-model-len", "1024")
ROWS = (
    Row("gptq, cpu", "gptq", "compile", ("--target", "cpu:native", *_LIMITS)),
    Row("gptq, cuda", "gptq", "compile", ("--target", "cuda:sm_90", *_LIMITS)),
    Row("fp8-block, cuda", "fp8", "compile", ("--target", "cuda:sm_90", *_LIMITS)),
    Row("bf16 to int4, cuda", "bf16", "compile", ("--target", "cuda:sm_90", "--quant", "int4", *_LIMITS)),
    Row("bf16 to int8, cpu", "bf16", "compile", ("--target", "cpu:native", "--quant", "int8", *_LIMITS)),
    Row("bf16 to int4, checkpoint", "bf16", "quantize", ("--scheme", "int4")),
)


def stored(shape: shapes.Shape, form: str) -> Iterator[Tensor]:
    """The tensors of a checkpoint in `form`: bf16, gptq (4 bits, groups of 128) or fp8 (tiles of 128 by 128)."""
    scale = {"bf16": ("BF16", b"\x80\x3f"), "gptq": ("F16", b"\x00\x3c"), "fp8": ("BF16", b"\x80\x3f")}[form]
    small = {"BF16": b"\xa4\x3c", "F16": b"\x1f\x25"}  # 0.02
    for name, dims in shape.tensors():
        if "norm" in name:
            yield Tensor(name, scale[0], dims, scale[1])
        elif form == "bf16" or "_proj" not in name:
            yield Tensor(name, scale[0], dims, small[scale[0]])
        elif form == "gptq":
            (n, k), stem = dims, name.removesuffix("weight")
            yield Tensor(f"{stem}qweight", "I32", (k // 8, n))
            yield Tensor(f"{stem}qzeros", "I32", (k // GROUP, n // 8), b"\x77")
            yield Tensor(f"{stem}scales", "F16", (k // GROUP, n), b"\x1f\x15")
        else:
            yield Tensor(name, "F8_E4M3", dims)
            yield Tensor(f"{name}_scale_inv", "F32", tuple(-(-d // GROUP) for d in dims), b"\x0a\xd7\x23\x3c")


def checkpoint(shape: shapes.Shape, form: str, root: Path) -> Path:
    """Write the checkpoint below `root`, unless it exists. Codes of fp8 are finite."""
    path = root / f"{shape.name}-{shape.layers}-{form}"
    if (path / "config.json").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    tensors, index = list(stored(shape, form)), {}
    drawn = np.random.default_rng(0).integers(0, 256, PIECE, np.uint8) & (0xF7 if form == "fp8" else 0xFF)
    half = len(tensors) // 2
    for i, shard in enumerate((tensors[:half], tensors[half:])):
        name = f"model-{i + 1:05d}-of-00002.safetensors"
        _write(path / name, shard, drawn.tobytes())
        index |= {t.name: name for t in shard}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    more: Mapping[str, Any] = {"gptq": GPTQ, "fp8": FP8}.get(form, {})
    config = shape.config() | ({"quantization_config": dict(more)} if more else {})
    (path / "config.json").write_text(json.dumps(config, indent=1))
    return path


def _write(path: Path, tensors: Sequence[Tensor], drawn: bytes) -> None:
    header, at = {}, 0
    for t in tensors:
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for t in tensors:
            piece = t.value * (PIECE // len(t.value)) if t.value else drawn
            for start in range(0, t.nbytes, PIECE):
                f.write(piece[: t.nbytes - start])


def forget(folder: Path) -> int:
    """Drop the files of a folder from the page cache; return their bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
            with open(path, "rb") as f:
                os.fsync(f.fileno())
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total


def seconds_to_read(folder: Path) -> float:
    """Read all files of a folder once, in order."""
    forget(folder)
    began = time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as f:
            while f.read(PIECE):
                pass
    return time.perf_counter() - began


def seconds_to_write(file: Path, size: int) -> float:
    """Write a file of `size` bytes, with its data on the disk at the end, and remove it."""
    began = time.perf_counter()
    with open(file, "wb", buffering=0) as f:
        for start in range(0, size, PIECE):
            f.write(bytes(min(PIECE, size - start)))
        os.fsync(f.fileno())
    seconds = time.perf_counter() - began
    file.unlink()
    return seconds


def measure(row: Row, shape: shapes.Shape, root: Path, table: Table) -> None:
    """Run one row. The time includes compiling kernels that no earlier run into DIR has compiled."""
    model, out, cache = checkpoint(shape, row.checkpoint, root), root / "result", root / "cache"
    command = [*LLMC, row.command, str(model), *row.arguments]
    if row.command == "compile":
        command += ["-o", str(out), "--force", "--cache", str(cache)]
    else:
        command.append(str(out))
    read = seconds_to_read(model)
    for old in (out, cache / "reuse"):
        shutil.rmtree(old, ignore_errors=True)
    nbytes = forget(model)
    ran = run(command)
    size = forget(out)
    shutil.rmtree(out)
    write = seconds_to_write(root / "probe", size)
    largest = max(t.nbytes for t in stored(shape, row.checkpoint))
    table.add(
        row.name, f"{nbytes / 1e9:.1f}", f"{size / 1e9:.1f}", f"{ran.peak / GIB:.2f}", f"{2 + largest / GIB:.2f}",
        f"{ran.seconds:.1f}", f"{ran.cpu_seconds:.1f}", f"{read:.1f}", f"{write:.1f}",
    )  # fmt: skip
    print(table.text().splitlines()[-1], flush=True)
    print("    " + "; ".join(line for line in ran.output.splitlines() if line.startswith("[")), flush=True)


def main() -> None:
    """Parse the arguments and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--layers", type=int, default=shapes.LLAMA31_8B.layers)
    parser.add_argument("--rows", default="", metavar="A,B", help="names that a row's name begins with (all)")
    options = parser.parse_args()
    shape = replace(shapes.LLAMA31_8B, layers=options.layers)
    table = Table(
        f"Compiling quantised weights, {shape.name}, {shape.layers} layers ({machine()})",
        ("row", "read GB", "written GB", "peak GiB", "goal GiB", "s", "CPU s", "s to read", "s to write"),
    )
    print("\n".join(table.text().splitlines()[-2:]), flush=True)
    for row in ROWS:
        if any(row.name.startswith(x.strip()) for x in options.rows.split(",")):
            measure(row, shape, options.root, table)
    print("\n" + table.text())


if __name__ == "__main__":
    main()
