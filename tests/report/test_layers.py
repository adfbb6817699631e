"""`--layers N`: exactly the first layers of the model, in an artifact that is marked as partial."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from llmc_runtime.api.llm import LLM
from models.cases import LISTED, UNLISTED, Case
from models.kit import eager_logits, ir_logits, prompts, save
from report.conftest import Made

from llmc.cli import main
from llmc.diagnostics import Diagnostic
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import trace

SOME = [c for c in (*LISTED, *UNLISTED) if c.name in ("llama", "gpt2", "deepseek_v3")]


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in SOME])
def test_the_first_layers_are_those_of_the_model(case: Case, tmp_path: Path) -> None:
    """The logits are those of the real model whose other layers were taken out by hand."""
    model = save(case, tmp_path)
    base = next(m for m in (getattr(model, n, None) for n in ("model", "transformer")) if m is not None)
    name = "layers" if hasattr(base, "layers") else "h"
    layers = getattr(base, name)
    setattr(base, name, layers[:1])
    model.config.num_hidden_layers = 1
    base.config.num_hidden_layers = 1
    traced = trace(tmp_path, layers=1, **case.trace)
    assert traced.facts.layers == (1, len(layers)) and len(traced.facts.heads) == 1
    tokens, positions = prompts(case.lengths, 320)
    last = np.arange(0, len(tokens), 3)
    with Checkpoint(traced) as checkpoint:
        got = ir_logits(traced.module, traced, checkpoint, tokens, positions, last)
    want = eager_logits(model, tokens, case.lengths)[last]
    assert np.linalg.norm(got - want) <= 1e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("count", [2, 3, 0])
def test_more_layers_than_there_are_is_refused(made: Made, count: int) -> None:
    with pytest.raises(Diagnostic, match="the model has 2") as e:
        trace(made.model, layers=count)
    assert e.value.code == "E312" and "give 1 to 1" in e.value.remedy


def test_a_quick_build_says_what_it_is(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quick.llmc"
    args = ["compile", str(made.model), "-o", str(out), "--cache", str(made.cache), "--max-num-seqs", "4"]
    assert main([*args, "--layers", "1", "--no-weights", "--report"]) == 0
    output = capsys.readouterr().err
    assert "the first 1 of 2 layers" in output and "not the model" in output
    source = json.loads((out / "manifest.json").read_text())["source"]
    assert (source["layers"], source["of_layers"]) == (1, 2)
    assert "A quick build: the first 1 of 2 layers" in (tmp_path / "quick.html").read_text()
    text = io.StringIO()
    assert main(["inspect", str(out)], text) == 0 and "ONLY the first 1 of 2 layers" in text.getvalue().splitlines()[0]
    text = io.StringIO()
    assert main(["diff", str(made.artifact), str(out), "--json"], text) == 1
    about = {r["what"]: (r["a"], r["b"]) for r in json.loads(text.getvalue())["about"]}
    assert about["source.layers"] == (0, 1)
    assert main(["pack", str(out), str(made.model)]) == 0  # of the whole checkpoint, the first layer
    messages: list[str] = []
    llm = LLM(out, say=messages.append)
    try:
        assert any(s.startswith("NOT THE WHOLE MODEL, only the first 1 of 2 layers") for s in messages)
        assert len(llm.generate([{"prompt_token_ids": [1, 2, 3]}])[0].outputs[0].token_ids) > 0
    finally:
        llm.close()
    quiet: list[str] = []
    LLM(made.artifact, say=quiet.append).close()
    assert quiet and not any("NOT" in s for s in quiet)
