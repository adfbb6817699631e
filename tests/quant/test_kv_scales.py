"""KV cache entries of checkpoints: schemes, names of scales, and damaged ones."""

from __future__ import annotations

import numpy as np
import pytest

from llmc.diagnostics import Diagnostic
from llmc.quant.kv_scales import kv_dtype_of, kv_scales_of

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def config(scheme: object) -> dict[str, object]:
    return {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}


def test_scheme() -> None:
    assert kv_dtype_of(config(SCHEME)) == "f8e4m3"
    assert kv_dtype_of(config(None)) == kv_dtype_of({}) == ""
    assert kv_dtype_of({"quantization_config": "awq"}) == ""


def test_algorithms_of_modelopt() -> None:
    """Also where hf_quant_config.json has them."""
    assert (
        kv_dtype_of(config("FP8")) == kv_dtype_of({"quantization_config": {"kv_cache_quant_algo": "fp8"}}) == "f8e4m3"
    )
    nested = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    assert kv_dtype_of({"quantization_config": nested}) == "f8e4m3"
    assert kv_dtype_of({"quantization_config": {"quantization": {"kv_cache_quant_algo": None}}}) == ""
    assert kv_dtype_of({"quantization_config": {"kv_cache_quant_algo": "auto"}}) == ""
    with pytest.raises(Diagnostic, match=r"E340.*NVFP4_AFFINE"):
        kv_dtype_of({"quantization_config": {"kv_cache_quant_algo": "NVFP4_AFFINE"}})


@pytest.mark.parametrize(
    "scheme", [{**SCHEME, "num_bits": 4}, {**SCHEME, "type": "int"}, {**SCHEME, "dynamic": True}, 8]
)
def test_other_schemes_are_refused(scheme: object) -> None:
    with pytest.raises(Diagnostic, match=r"E340.*kv_cache_scheme"):
        kv_dtype_of(config(scheme))


def test_names() -> None:
    stored = {
        "model.layers.0.self_attn.k_scale": [0.5],
        "model.layers.0.self_attn.v_scale": 0.25,
        "model.layers.11.attn.k_scale": [1.0, 2.0],
        "model.layers.12.self_attn.v_scale": [[[3.0]], [[4.0]]],
        "model.layers.2.self_attn.k_scale": -1.0,
        "model.layers.2.self_attn.v_scale": -1.0,
        "model.layers.3.mlp.up_proj.weight_scale": [3.0],
        "model.layers.3.self_attn.q_scale": [3.0],
        "model.layers.4.self_attn.kv_scale": [4.0],
        "model.layers.6.self_attn.k_proj.k_scale": 0.5,
        "model.layers.6.self_attn.v_proj.v_scale": 2.0,
        "model.layers.5.self_attn.k_proj.output_scale": [5.0],
        "model.layers.5.self_attn.v_proj.output_scale": [6.0],
        "model.layers.5.self_attn.o_proj.output_scale": [7.0],
    }
    found = kv_scales_of(stored, lambda name: np.asarray(stored[name], np.float32))
    assert found.keys() == {0, 4, 5, 6, 11, 12}
    assert [float(x) for x in found[6]] == [0.5, 2.0]
    assert [float(x) for x in (*found[4], *found[5])] == [4, 4, 5, 6]
    assert [float(x) for x in found[0]] == [0.5, 0.25]
    assert found[12][1].tolist() == [3.0, 4.0]
    assert found[11][0].tolist() == [1.0, 2.0] and found[11][1] == 1


@pytest.mark.parametrize(
    ("code", "scale"),
    [("E341", [[1.0, 2.0]]), ("E342", 0.0), ("E342", [1.0, -1.0]), ("E342", np.nan), ("E342", [np.inf])],
)
def test_damaged_scales(code: str, scale: object) -> None:
    name = "model.layers.1.self_attn.v_scale"
    with pytest.raises(Diagnostic, match=rf"{code}.*{name}"):
        kv_scales_of([name], lambda _: np.asarray(scale, np.float32))
