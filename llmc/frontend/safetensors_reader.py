"""The safetensors files of a folder as one mapping from names to tensors. Opening reads only headers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.json_fields import is_safe_name, too_much
from llmc_runtime.format.safetensors import MAX_HEADER, header_length
from safetensors import SafetensorError, safe_open

from llmc.diagnostics import Diagnostic
from llmc.frontend import unsupported
from llmc.frontend.model_folder import check_weights, is_regular, read_json
from llmc.frontend.unsupported import INDEX, SINGLE

MAX_VALUES = 500_000  # limit of one header; about 60,000 tensors

# The float dtypes by their names in safetensors.
STORED = MappingProxyType({"F64": "f64", "F32": "f32", "BF16": "bf16", "F16": "f16"})
NUMPY = MappingProxyType(
    {
        "f64": np.dtype(np.float64),
        "f32": np.dtype(np.float32),
        "bf16": np.dtype(ml_dtypes.bfloat16),
        "f16": np.dtype(np.float16),
        "i32": np.dtype(np.int32),
    }
)


@dataclass(frozen=True)
class Stored:
    """The location of a stored tensor. `dtype` is its name in safetensors."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


class TensorFiles:
    """All tensors of a checkpoint. Files are memory-mapped: memory use grows only with the rows that are read."""

    def __init__(self, folder: Path):
        """Open all files and read their headers; raises Diagnostic E320, E321 or E322."""
        self.folder = folder
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}
        listed = _listed(folder)
        found: dict[str, Stored] = {}
        for file in sorted(set(listed.values()), key=str) if listed else [folder / SINGLE]:
            for name in self._keys(file):
                if not listed or listed.get(name) == file:
                    view = self._handles[file].get_slice(name)
                    found[name] = Stored(name, file, str(view.get_dtype()), tuple(view.get_shape()))
        self.tensors: Mapping[str, Stored] = MappingProxyType(found)
        if absent := sorted(listed.keys() - found.keys()):
            raise Diagnostic(
                "E322",
                f"{INDEX} places {absent[0][:200]!r} in {listed[absent[0]].name}, which does not contain it "
                f"({some(absent)})",
                f"download the index and the files again, from one revision; or {unsupported.SAVE_AGAIN.format('')}",
            )

    @property
    def files(self) -> tuple[Path, ...]:
        """The open files."""
        return tuple(self._handles)

    def read(self, stored: Stored, start: int, stop: int) -> np.ndarray:
        """Return rows start .. stop of the first axis (all of a rank-0 tensor) in the stored dtype."""
        try:
            handle = self._handles[stored.file]
            return handle.get_slice(stored.name)[start:stop] if stored.shape else handle.get_tensor(stored.name)
        except SafetensorError as e:
            raise _corrupt(stored.file, e) from e

    def close(self) -> None:
        """Close all files."""
        self._open.close()
        self._handles.clear()

    def _keys(self, file: Path) -> list[str]:
        _check_header(file)
        try:
            handle = self._open.enter_context(safe_open(file, framework="np"))
            self._handles[file] = handle
            return list(handle.keys())
        except (SafetensorError, OSError) as e:
            raise _corrupt(file, e) from e


def _check_header(file: Path) -> None:
    """Raise Diagnostic E321 if the file is missing, is shorter than its header, or has an excessively large header."""
    if not is_regular(file):
        what = (
            "is not a regular file" if file.exists() else "is a link to nothing" if file.is_symlink() else "is missing"
        )
        raise Diagnostic("E321", f"{file} {what}", "download the file again")
    size = file.stat().st_size
    try:
        with open(file, "rb") as opened:
            count = header_length(opened.read(8), size, "")
            with mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
                why = too_much(data[8 : 8 + count], MAX_HEADER, MAX_VALUES)
    except LlmcError as e:
        raise _corrupt(file, e.cause.removeprefix(": ")) from None
    except OSError as e:
        raise _corrupt(file, e) from None
    if why is not None:
        raise Diagnostic("E321", f"{file} has a header of {why}", "save the model again, in several files")


_AGAIN = "download the file again and compare its size and sha256 with the model's page"


def _corrupt(file: Path, why: object) -> Diagnostic:
    size = f" ({file.stat().st_size} bytes)" if is_regular(file) else ""
    return Diagnostic("E321", f"{file}{size} is cut short or damaged: {why}", _AGAIN)


def _listed(folder: Path) -> dict[str, Path]:
    """Map tensor names to files by the index; empty for a single-file checkpoint, even beside an index without it."""
    check_weights(folder)
    if not (folder / INDEX).exists() and not (folder / INDEX).is_symlink():
        return {}
    entries = read_json(folder / INDEX).get("weight_map")
    if not isinstance(entries, dict) or not entries or not all(isinstance(v, str) for v in entries.values()):
        raise Diagnostic("E322", f"{folder / INDEX} has no weight_map of names", "download the index again")
    if (folder / SINGLE).exists() and SINGLE not in entries.values():
        return {}
    named = {name: folder / name for name in sorted(set(entries.values())) if is_safe_name(name) and "/" not in name}
    for name in entries.values():
        if name not in named:
            cause = f"{folder / INDEX} has no plain file names in its weight_map: {name[:80]!r}"
            raise Diagnostic("E322", cause, "download the index again")
    missing = [name for name, file in named.items() if not file.exists()]
    if missing:
        raise Diagnostic(
            "E322",
            f"{INDEX} names files that {folder} lacks: {some(missing)}",
            "download the missing files into the folder",
        )
    return {name: named[f] for name, f in entries.items()}


def some(names: list[str]) -> str:
    """Return the first three names and the number of names, for a message."""
    return f"{', '.join(n[:120] for n in names[:3])}{', ...' if len(names) > 3 else ''}; {len(names)} in all"
