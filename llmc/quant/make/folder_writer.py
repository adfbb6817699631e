"""Writes a model folder: tensors in shards, their index, config.json, and the files of the tokenizer.

Quantised weights are stored as compressed-tensors stores them. Everything is written to a hidden folder next to
the output, which is renamed to the output once it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmc.diagnostics import Diagnostic
from llmc.quant.make.rounding import Quantised

SHARD_BYTES = 2 << 30  # bytes of tensors in a file
COPY_BYTES = 16 << 20  # bytes that are copied at a time
NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
        torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)  # fmt: skip


def check_free(out: Path) -> None:
    """Raise Diagnostic E120 if the output exists."""
    if os.path.lexists(out):
        raise Diagnostic("E120", f"{out} exists", "choose another folder, or remove it")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a new hidden folder next to `out`, and rename it to `out` at the end; an error removes it.

    Raises Diagnostic E120 if `out` exists, E123 if it cannot be written.
    """
    check_free(out)
    at: Path | None = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        at = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        yield at
        for path in (*at.rglob("*"), at):
            path.chmod(0o755 if path.is_dir() else 0o644)
            _sync(path)
        check_free(out)
        at.rename(out)
        _sync(out.parent)
    except OSError as e:
        raise Diagnostic("E123", f"{out} cannot be written: {e}", "free space, or write elsewhere") from e
    finally:
        if at is not None:
            shutil.rmtree(at, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class _Entry(NamedTuple):
    """A tensor whose bytes are in the spill file, from `start` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class ShardWriter:
    """Writes safetensors files of about `limit` bytes. Tensors wait in a file, so that memory holds one at a time."""

    def __init__(self, folder: Path, limit: int = SHARD_BYTES) -> None:
        """Write to `folder`, shards of at most `limit` bytes unless one tensor is larger."""
        self.folder = folder
        self.limit = limit
        self.total = 0
        self._spill: BinaryIO = tempfile.TemporaryFile(dir=folder)
        self._pending: list[_Entry] = []
        self._size = 0
        self._shards: list[list[str]] = []  # names of tensors

    def add(self, name: str, x: Tensor) -> None:
        """Add a tensor."""
        if self._pending and self._size + x.nbytes > self.limit:
            self._flush()
        self._spill.write(x.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._pending.append(_Entry(name, x.dtype, tuple(x.shape), self._size, x.nbytes))
        self._size += x.nbytes
        self.total += x.nbytes

    def add_weight(self, module: str, q: Quantised) -> None:
        """Add the tensors of a quantised weight."""
        for part, x in stored_parts(q).items():
            self.add(f"{module}.{part}", x)

    def finish(self) -> int:
        """Save the rest, name the shards and write their index; return their number."""
        self._flush()
        self._spill.close()
        count = len(self._shards)
        if count == 1:
            self._at(0).rename(self.folder / "model.safetensors")
            return count
        names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for i, name in enumerate(names):
            self._at(i).rename(self.folder / name)
        where = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
        write_json(self.folder / "model.safetensors.index.json", index)
        return count

    def _at(self, i: int) -> Path:
        return self.folder / f"shard-{i}.part"

    def _flush(self) -> None:
        """Write the pending tensors to a file, those of the largest elements first: so each is aligned."""
        entries = sorted(self._pending, key=lambda e: (-e.dtype.itemsize, e.name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for e in entries:
            header[e.name] = {"dtype": NAMES[e.dtype], "shape": e.shape, "data_offsets": (at, at + e.nbytes)}
            at += e.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(self._at(len(self._shards)), "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for e in entries:
                self._copy(e, out)
        self._shards.append([e.name for e in entries])
        self._spill.seek(0)
        self._spill.truncate()
        self._pending, self._size = [], 0

    def _copy(self, e: _Entry, out: BinaryIO) -> None:
        self._spill.seek(e.start)
        for done in range(0, e.nbytes, COPY_BYTES):
            out.write(self._spill.read(min(COPY_BYTES, e.nbytes - done)))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def copy_files(files: tuple[Path, ...], source: Path, folder: Path) -> None:
    """Copy the small files of a model, except config.json, under their names in `source`."""
    for path in files:
        name = path.relative_to(source)
        if str(name) != "config.json":
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack signed codes [n, k] of 4 or 8 bits along k into int32 words, least significant first, plus 2^(bits-1)."""
    raw = (codes.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
    raw = pad(raw, (0, -codes.shape[1] % (32 // bits)))
    joined = raw[:, ::2] | raw[:, 1::2] << 4 if bits == 4 else raw
    flat = joined.reshape(-1).contiguous()  # a contiguous single row may have a stride that is not a multiple of a word
    return flat.view(torch.int32).reshape(len(joined), joined.shape[1] // 4)


def stored_parts(q: Quantised) -> dict[str, Tensor]:
    """Return the tensors of a weight by the last part of their names."""
    recipe = q.grid.recipe
    parts = {"weight_scale": q.grid.scale}
    if recipe.layout != "pack-quantized":
        return parts | {"weight": q.codes}
    parts |= {"weight_packed": pack(q.codes, recipe.bits), "weight_shape": torch.tensor(q.codes.shape)}
    if q.grid.zero is not None:
        parts["weight_zero_point"] = pack(q.grid.zero.T, recipe.bits).T.contiguous()
    return parts
