"""The benches' own arithmetic: sizes of the real models, random checkpoints, the order of interleaved measurements."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from llmc_runtime.format.safetensors import header_length, parse_header

from bench import overload, shapes
from llmc.frontend.model_folder import open_source

PUBLISHED = (
    (shapes.QWEN25_05B, 494_032_768), (shapes.LLAMA31_8B, 8_030_261_248), (shapes.LLAMA32_1B, 1_235_814_400),
    (shapes.QWEN3_06B, 596_049_920), (shapes.QWEN3_30B_A3B, 30_532_122_624),
)  # fmt: skip


@pytest.mark.parametrize(("shape", "parameters"), PUBLISHED, ids=[s.name for s, _ in PUBLISHED])
def test_a_shape_has_the_real_models_parameters(shape: shapes.Shape, parameters: int) -> None:
    assert shape.parameters == parameters


def test_a_decode_step_reads_a_tied_head_but_no_untied_embedding() -> None:
    q, llama = shapes.QWEN25_05B, shapes.LLAMA31_8B
    assert q.read_per_token == 2 * q.parameters
    assert llama.read_per_token == 2 * (llama.parameters - llama.vocab * llama.hidden)


def test_prefill_counts_the_products_of_the_layers() -> None:
    s = shapes.SMALL
    d, f, q, kv = s.hidden, s.intermediate, s.heads * s.head_dim, s.kv_heads * s.head_dim
    assert s.prefill_flops_per_token == 2 * s.layers * (2 * d * q + 2 * d * kv + 3 * d * f)


def test_a_checkpoint_holds_every_tensor_in_bf16(tmp_path: Path) -> None:
    path = shapes.checkpoint(shapes.SMALL, tmp_path)
    assert open_source(path).model_type == "llama"
    assert json.loads((path / "config.json").read_text())["hidden_size"] == shapes.SMALL.hidden
    data = np.fromfile(path / "model.safetensors", np.uint8)
    start = 8 + header_length(bytes(data[:8]), len(data), "")
    infos = parse_header(bytes(data[8:start]), len(data), "")
    assert {n: (t.dtype, t.shape) for n, t in infos.items()} == {n: ("bf16", x) for n, x in shapes.SMALL.tensors()}

    def values(name: str) -> np.ndarray:
        bits = data[infos[name].begin : infos[name].end].view(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32)

    norm, gate = values("model.norm.weight"), values("model.layers.0.mlp.gate_proj.weight")
    assert abs(norm.mean() - 1) < 0.01 and 0.015 < gate.std() < 0.025 and np.isfinite(gate).all()


def test_a_big_checkpoint_is_sharded_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "SHARD", 1 << 20)
    path = shapes.checkpoint(shapes.SMALL, tmp_path)
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == {n for n, _ in shapes.SMALL.tensors()}
    assert len(set(index.values())) > 1 and all((path / name).is_file() for name in index.values())


def test_measurements_take_turns_forwards_then_backwards() -> None:
    kit = pytest.importorskip("bench.kit")
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = kit.interleave({n: lambda n=n: measure(n) for n in "AB"}, 2)
    assert "".join(order) == "ABBA"
    assert found == {"A": [1.0, 4.0], "B": [2.0, 3.0]}


def test_a_load_above_the_peak_fills_the_queue_before_it_is_measured() -> None:
    assert [overload.filling(64, rate, 40.0) for rate in (20.0, 40.0, 72.0, 800.0)] == [0, 0, 2.0, 64 / 760]


def test_overload_medians_are_of_loads_measured_several_times() -> None:
    def row(load: float, share: float) -> overload.Row:
        values = dict.fromkeys((field.name for field in dataclasses.fields(overload.Row)), 0.0)
        return overload.Row(**{**values, "mode": "new", "load": load, "share": share})  # type: ignore[arg-type]

    (text,) = overload.medians([row(10, 0.9), row(10, 0.5), row(5, 0.1), row(10, 1.0)])
    assert text.startswith("median of 3, new, 10 times the peak: goodput 90%")


def test_a_server_on_every_core_leaves_none_for_the_client() -> None:
    with pytest.raises(SystemExit, match="no core is left"):
        overload.leave(os.sched_getaffinity(0))
