"""Weights of artifacts that carry none (`--weights random:SEED`): finite, of usual size, equal on every machine."""

from __future__ import annotations

import hashlib

import numpy as np

from llmc_runtime.format.program import DTYPE_BITS

_TILE = 1 << 20
STD = 0.02


class RandomWeights:
    """Fills tensors from a seed: vectors (norms) with ones, matrices with N(0, 0.02), integers with random bits."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = np.random.Generator(np.random.PCG64(seed))
        self._normal = (rng.standard_normal(_TILE, dtype=np.float32) * np.float32(STD)).clip(-3 * STD, 3 * STD)
        self._bits = rng.integers(0, 256, _TILE, dtype=np.uint8)
        self._tiles: dict[str, np.ndarray] = {}

    def fill(self, name: str, dtype: str, rank: int, out: np.ndarray) -> None:
        """Write the tensor's bytes into `out`, u8[nbytes]; every name begins elsewhere in the sequence."""
        if rank < 2:
            ones = _encode(np.ones(1, np.float32), dtype)
            out[:] = np.tile(ones, len(out) // len(ones)) if ones is not None else 0
            return
        if dtype not in self._tiles:
            tile = _encode(self._normal, dtype)
            self._tiles[dtype] = self._bits if tile is None else tile
        tile = self._tiles[dtype]
        width = max(1, DTYPE_BITS[dtype] // 8)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        at = int.from_bytes(digest[:4], "little") % (len(tile) // width) * width
        done = 0
        while done < len(out):
            piece = tile[at : at + len(out) - done]
            out[done : done + len(piece)] = piece
            done, at = done + len(piece), 0


def _encode(values: np.ndarray, dtype: str) -> np.ndarray | None:
    """f32 values as the bytes of a float dtype; None where the dtype is not one that numpy or a shift can make."""
    if dtype == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)
    known = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(dtype)
    return None if known is None else np.ascontiguousarray(values.astype(known)).view(np.uint8)
