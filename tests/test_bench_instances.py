"""bench.gpu.instances with engines on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernel_cache import CACHE

from bench.gpu import instances
from llmc.driver import compile_model
from llmc.options import Options

DEMO = Path(__file__).parents[1] / "examples" / "demo-model-small"


@pytest.mark.slow
def test_each_engine_gets_as_many_requests_as_one_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile_model(DEMO, tmp_path / "model.llmc", Options(cache=CACHE, max_model_len=64, max_num_seqs=4))
    sizes = "--requests=3", "--input=4", "--output=5", "--rounds=1"
    for words, of_two in (((), 3), (("--each",), 6)):
        out = tmp_path / "rates.json"
        assert instances.main([str(tmp_path / "model.llmc"), *sizes, *words, f"--json={out}"]) == 0
        shown = capsys.readouterr().out
        assert "1 engines, 3 requests (3): " in shown and f"2 engines, {of_two} requests (" in shown
        assert set(json.loads(out.read_text())) == {"1", "2"}
