"""The fixtures decode, by the plain reference decoder, to what their producers dequantised."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from quant.reference import decode
from safetensors.torch import load_file

FIXTURES = sorted(p.parent for p in (Path(__file__).parent / "fixtures").glob("*/oracle.json"))
SIZE = 10 << 20  # bytes of all fixtures; git packs them to three quarters


def digest(w: torch.Tensor) -> str:
    return hashlib.sha256((w + 0.0).contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.drawn
@pytest.mark.parametrize("folder", FIXTURES, ids=lambda p: p.name)
def test_reference_decoder_equals_the_producer(folder: Path) -> None:
    record = json.loads((folder / "oracle.json").read_text())
    weights = decode(folder)
    assert sorted(weights) == sorted(record["weights"])
    assert {k: list(w.shape) for k, w in weights.items()} == {k: v["shape"] for k, v in record["weights"].items()}
    rows = {k: v for k, v in load_file(folder / "oracle.safetensors").items() if k.startswith("rows.")}
    assert rows or not weights
    for key, expected in rows.items():
        w = weights[key.removeprefix("rows.")]
        parts = [w] if w.ndim == 2 else [w[0], w[-1]]
        found = torch.cat([p[[0, len(p) // 2, len(p) - 1]] for p in parts])
        torch.testing.assert_close(found, expected, rtol=2**-23, atol=0)
    differ = [k for k, w in weights.items() if digest(w) != record["weights"][k]["sha256"]]
    assert not differ


def test_fixtures_stay_small() -> None:
    assert sum(p.stat().st_size for folder in FIXTURES for p in folder.iterdir()) <= SIZE
