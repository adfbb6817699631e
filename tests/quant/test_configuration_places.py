"""Where the quantization_config of a checkpoint may be: under an old key, in a file of its own, in a text model."""

from __future__ import annotations

from pathlib import Path

import pytest
from models.kit import fails
from quant.test_decode import opened
from quant.test_handmade import CASES, GPTQ, edit, made, open_all

from llmc.frontend.quantization_files import with_quantization


@pytest.mark.parametrize("name", ["gptq-head", "fp8-plain-modules"])
def test_a_checkpoint_that_does_not_say_how_it_is_quantised(name: str, tmp_path: Path) -> None:
    folder = made(CASES[name], tmp_path / "model").folder
    edit(folder, lambda c: c.pop("quantization_config"))
    fails("E340", "no quantization_config", "quantize_config.json", do=lambda: open_all(folder))


def test_the_old_key_of_the_configuration(tmp_path: Path) -> None:
    """`compression_config` counts unless it contradicts `quantization_config`."""
    folder = made(CASES["gptq-head"], tmp_path / "model").folder
    edit(folder, lambda c: c.update(compression_config=c.pop("quantization_config")))
    with opened(folder) as checkpoint:
        assert len(checkpoint.formats) == 15
    edit(folder, lambda c: c.update(quantization_config=GPTQ | {"bits": 8}))
    fails("E340", "compression_config", "bits", "4", "8", do=lambda: open_all(folder))


def test_places_of_the_configuration() -> None:
    """The first that has a key counts; the text model of a larger model has its own."""
    assert with_quantization({"text_config": {"quantization_config": GPTQ}}, {})["quantization_config"] == GPTQ
    one = {"quantization_config": {"quant_method": "gptq", "bits": 4, "checkpoint_format": None}}
    beside = {"quantize_config.json": {"bits": 4, "checkpoint_format": "gptq_v2", "group_size": 32}}
    want = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2", "group_size": 32}
    assert with_quantization(one, beside)["quantization_config"] == want
    old = {"compression_config": {"format": "dense"}}
    assert with_quantization(old, {})["quantization_config"]["quant_method"] == "compressed-tensors"
