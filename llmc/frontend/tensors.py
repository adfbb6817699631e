"""The safetensors files of a folder as one name -> tensor mapping; only headers are read until rows are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from llmc.diagnostics import Diagnostic

from .kinds import INDEX, SINGLE
from .source import check_weights, read_json

# safetensors' names of the dtypes that a float model's weights come in.
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
    """Where a tensor lies. dtype: safetensors' own name of it."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]


class TensorFiles:
    """All tensors of a checkpoint. Files are mapped, never loaded: memory grows with the rows asked for alone."""

    def __init__(self, folder: Path):
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
                f"{INDEX} places {absent[0]!r} in {listed[absent[0]].name}, which does not hold it ({some(absent)})",
                "fetch the index and the files again, from one revision",
            )

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self._handles)

    def read(self, stored: Stored, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop of the first axis (a rank-0 tensor as it is), in the stored dtype."""
        try:
            handle = self._handles[stored.file]
            return handle.get_slice(stored.name)[start:stop] if stored.shape else handle.get_tensor(stored.name)
        except SafetensorError as e:
            raise _corrupt(stored.file, e) from e

    def close(self) -> None:
        self._open.close()
        self._handles.clear()

    def _keys(self, file: Path) -> list[str]:
        try:
            handle = self._open.enter_context(safe_open(file, framework="np"))
            self._handles[file] = handle
            return list(handle.keys())
        except (SafetensorError, OSError) as e:
            raise _corrupt(file, e) from e


def _corrupt(file: Path, e: Exception) -> Diagnostic:
    return Diagnostic(
        "E321",
        f"{file} ({file.stat().st_size} bytes) is cut short or damaged: {e}",
        "fetch the file again and compare its size and sha256 with the model's page",
    )


def _listed(folder: Path) -> dict[str, Path]:
    """Tensor name -> file by the index; empty where the checkpoint is one file."""
    check_weights(folder)
    if not (folder / INDEX).is_file():
        return {}
    entries = read_json(folder / INDEX).get("weight_map")
    if not isinstance(entries, dict) or not all(isinstance(v, str) and v == Path(v).name for v in entries.values()):
        raise Diagnostic("E322", f"{folder / INDEX} has no weight_map of plain file names", "fetch the index again")
    missing = sorted({f for f in entries.values() if not (folder / f).is_file()})
    if missing:
        raise Diagnostic(
            "E322",
            f"{INDEX} names files that {folder} lacks: {some(missing)}",
            "fetch the missing files into the folder",
        )
    return {name: folder / f for name, f in entries.items()}


def some(names: list[str]) -> str:
    """The first few names and how many there are."""
    return f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}; {len(names)} in all"
