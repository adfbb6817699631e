"""Random changes of quantization_config: an error with a code and a remedy, or the same weights."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from corpus.damage import changed
from draw import of_test
from quant.test_decode import FIXTURES

from llmc.diagnostics import Diagnostic
from llmc.extension import load
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.quantization_files import with_quantization
from llmc.frontend.trace_model import Traced, trace
from llmc.quant.decoder import decoder_of

NAMES = (
    "ct-mixed", "gptq-4bit-dynamic", "ar-mixed", "awq-gptqmodel", "hf-fp8-block", "mo-nvfp4", "bnb-nf4", "ct-fp8-kv",
    "ct-w4a16-asym", "gpt-oss-mxfp4", "ct-moe-fp8", "ar-to-gptq-mixed", "ct-w8a8-static-asym",
)  # fmt: skip
SIZES = "weight_block_size", "block_structure"  # tiles of another size may need equally many scales


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(n, marks=pytest.mark.drawn) for n in NAMES[1:])])
def test_changes_of_a_configuration(name: str) -> None:
    rng = Random(of_test())
    config = json.loads((FIXTURES / name / "config.json").read_text())
    given = with_quantization(config, {})["quantization_config"]
    traced = trace(FIXTURES / name, dtype="f32")
    want, seen = read(traced, config, given), Counter[str]()
    for _ in range(60):
        other, words = changed(given, rng)
        try:
            found = read(traced, config, other)
            assert found in (want, None) or any(size in words for size in SIZES), f"other weights: {words}"
            seen["accepted"] += 1
        except Diagnostic as e:
            assert e.code.startswith("E3") and e.remedy, f"{words}: {e}"
            seen[e.code] += 1
    assert len(seen) > 1, seen


def read(traced: Traced, config: Mapping[str, Any], quantisation: Any) -> int | None:
    """A checksum of the quantised weights; None if the configuration is empty."""
    changed_config = with_quantization({**config, "quantization_config": quantisation}, {})
    decoder = decoder_of(changed_config, load().schemes)
    if decoder is None:
        return None
    total = 0
    with Checkpoint(traced, decoder=decoder) as checkpoint:
        for name in sorted(checkpoint.formats)[:6]:
            total = zlib.crc32(checkpoint.read(name).tobytes(), total)
    return total
