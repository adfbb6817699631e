"""The safetensors files of a folder as one mapping from names to tensors. Opening reads only headers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, MADV_DONTNEED, PAGESIZE, mmap
from pathlib import Path
from types import MappingProxyType

import numpy as np
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.json_fields import is_safe_name, load_json, too_much
from llmc_runtime.format.safetensors import MAX_HEADER, TensorInfo, header_length, parse_header

from llmc.diagnostics import Diagnostic
from llmc.frontend import unsupported
from llmc.frontend.model_folder import check_weights, is_regular, read_json
from llmc.frontend.unsupported import INDEX, SINGLE
from llmc.frontend.weight_shards import numbered_shards
from llmc.ir.dtype import DTYPES

_COMPARED_BYTES = 1 << 20  # bytes that are compared at a time
MAX_VALUES = 500_000  # limit of one header; about 60,000 tensors


@dataclass(frozen=True)
class Stored:
    """The location of a stored tensor: its file and the offset of its first byte.

    `dtype` is the IR's name of the dtype, or safetensors' name if the IR has no such dtype.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int


class TensorFiles:
    """All tensors of a checkpoint. Files are memory-mapped: memory use grows only with the rows that are read.

    `unlisted` are the names of tensors that the index lacks, in files that it names: transformers loads them, too.
    """

    def __init__(self, folder: Path):
        """Open all files and read their headers; raises Diagnostic E320, E321 or E322."""
        self.folder = folder
        self._open = ExitStack()
        self._data: dict[Path, mmap] = {}
        listed = _listed(folder)
        tensors, duplicates = self._collect(listed)
        self.tensors: Mapping[str, Stored] = MappingProxyType(tensors)
        self.unlisted = frozenset(tensors.keys() - listed.keys()) if listed else frozenset[str]()
        if absent := sorted(listed.keys() - tensors.keys()):
            raise Diagnostic(
                "E322",
                f"{INDEX} places {absent[0][:200]!r} in {listed[absent[0]].name}, which does not contain it "
                f"({shortened(absent)})",
                f"download the index and the files again, from one revision; or {unsupported.SAVE_AGAIN.format('')}",
            )
        for stored in duplicates:
            if not self._equal(stored, first := tensors[stored.name]):
                cause = f"{stored.name[:200]!r} is in {first.file.name} and in {stored.file.name}, and they differ"
                raise Diagnostic("E322", cause, "download the index and the files again, from one revision")

    def _collect(self, listed: Mapping[str, Path]) -> tuple[dict[str, Stored], list[Stored]]:
        """Return all tensors by name; those in `listed`, the index, are read from the file that it names.

        A tensor that the index lacks is taken from the first file that has it.
        """
        tensors: dict[str, Stored] = {}
        duplicates: list[Stored] = []  # further tensors of the same names
        for file in sorted(set(listed.values()), key=str) if listed else _unlisted_files(self.folder):
            for t in self._header(file).values():
                stored = Stored(t.name, file, t.dtype, t.shape, t.begin)
                is_listed_elsewhere = t.name in listed and listed[t.name] != file
                is_found_unlisted = t.name not in listed and t.name in tensors
                if is_listed_elsewhere or is_found_unlisted:
                    duplicates.append(stored)
                else:
                    tensors[t.name] = stored
        return tensors, duplicates

    @property
    def files(self) -> tuple[Path, ...]:
        """The open files."""
        return tuple(self._data)

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return rows of the first axis (all of a rank-0 tensor) as a new array in the stored dtype."""
        stored = self.tensors[name]
        dtype = DTYPES[stored.dtype].np
        if not stored.shape:
            return np.frombuffer(self._data[stored.file], dtype, 1, stored.begin).reshape(()).copy()
        start, stop, _ = rows.indices(stored.shape[0])
        width = prod(stored.shape[1:])
        count = max(0, stop - start)
        begin = stored.begin + start * width * dtype.itemsize
        if not count * width:
            return np.empty((count, *stored.shape[1:]), dtype)
        data = self._data[stored.file]
        copied = np.frombuffer(data, dtype, count * width, begin).reshape(-1, *stored.shape[1:]).copy()
        # Pages that were read would count as memory of this process until the file is closed.
        page = begin // PAGESIZE * PAGESIZE
        data.madvise(MADV_DONTNEED, page, begin + copied.nbytes - page)
        return copied

    def metadata(self) -> Mapping[str, str]:
        """Return the `__metadata__` of all files' headers, texts by name."""
        merged: dict[str, str] = {}
        for data in self._data.values():
            header = load_json(data[8 : 8 + header_length(data[:8], len(data), "")], "")
            texts = header.get("__metadata__") or {}
            merged |= {k: v for k, v in texts.items() if isinstance(v, str)} if isinstance(texts, dict) else {}
        return MappingProxyType(merged)

    def close(self) -> None:
        """Close all files."""
        self._open.close()
        self._data.clear()

    def _equal(self, a: Stored, b: Stored) -> bool:
        """Whether two stored tensors have the same dtype, shape and bytes."""
        if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in DTYPES:
            return False
        size = prod(a.shape) * DTYPES[a.dtype].np.itemsize
        x = self._data[a.file]
        y = self._data[b.file]
        ranges = ((i, min(size, i + _COMPARED_BYTES)) for i in range(0, size, _COMPARED_BYTES))
        return all(x[a.begin + i : a.begin + j] == y[b.begin + i : b.begin + j] for i, j in ranges)

    def _header(self, file: Path) -> Mapping[str, TensorInfo]:
        """Map a file and return its tensors; raises Diagnostic E321 if it is missing, damaged or excessively large."""
        if not is_regular(file):
            problem = "is missing"
            if file.exists() or file.is_symlink():
                problem = "is not a regular file" if file.exists() else "is a link to nothing"
            raise Diagnostic("E321", f"{file} {problem}", "download the file again")
        try:
            size = file.stat().st_size
            with open(file, "rb") as opened:
                count = header_length(opened.read(8), size, "")
                data = self._open.enter_context(mmap(opened.fileno(), 0, access=ACCESS_READ))
            header = data[8 : 8 + count]
            if (why := too_much(header, MAX_HEADER, MAX_VALUES)) is not None:
                raise Diagnostic("E321", f"{file} has a header of {why}", "save the model again, in several files")
            self._data[file] = data
            return parse_header(header, size, "")
        except LlmcError as e:
            raise _corrupt(file, e.cause.removeprefix(": ")) from None
        except OSError as e:
            raise _corrupt(file, e) from None


_DOWNLOAD_AGAIN = "download the file again and compare its size and sha256 with the model's page"


def _corrupt(file: Path, why: object) -> Diagnostic:
    size = f" ({file.stat().st_size} bytes)" if is_regular(file) else ""
    return Diagnostic("E321", f"{file}{size} is cut short or damaged: {why}", _DOWNLOAD_AGAIN)


def _listed(folder: Path) -> dict[str, Path]:
    """Map tensor names to files by the index; empty without one, and for a single file that the index does not name."""
    check_weights(folder)
    if not (folder / INDEX).exists() and not (folder / INDEX).is_symlink():
        return {}
    entries = read_json(folder / INDEX).get("weight_map")
    if not isinstance(entries, dict) or not entries or not all(isinstance(v, str) for v in entries.values()):
        raise Diagnostic("E322", f"{folder / INDEX} has no weight_map of names", "download the index again")
    if (folder / SINGLE).exists() and SINGLE not in entries.values():
        return {}
    files = sorted(set(entries.values()))
    if unsafe := [name for name in files if not is_safe_name(name) or "/" in name]:
        cause = f"{folder / INDEX} has no plain file names in its weight_map: {unsafe[0][:80]!r}"
        raise Diagnostic("E322", cause, "download the index again")
    if missing := [name for name in files if not (folder / name).exists()]:
        cause = f"{INDEX} names files that {folder} lacks: {shortened(missing)}"
        raise Diagnostic("E322", cause, "download the missing files into the folder")
    return {name: folder / file for name, file in entries.items()}


def _unlisted_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder whose index does not apply: the single file, or else all numbered shards."""
    if (folder / SINGLE).exists() or (folder / SINGLE).is_symlink():
        return [folder / SINGLE]
    return [folder / name for name in numbered_shards(p.name for p in folder.iterdir())]


def shortened(names: list[str]) -> str:
    """Return the first three names and the number of names, for a message."""
    return f"{', '.join(n[:120] for n in names[:3])}{', ...' if len(names) > 3 else ''}; {len(names)} in all"
