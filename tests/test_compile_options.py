"""The options of a compile: one declaration gives the keyword, the flag, its help, and what the artifact records."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.option_type import options_of

from llmc.builtin import EXTENSION
from llmc.compilation import RECURRENT_ROWS, default_rows
from llmc.console import Quiet
from llmc.driver import start
from llmc.frontend.hub import Hub
from llmc.ir.ops import OPS
from llmc.ir.text import parse as parse_ir
from llmc.options import FILES, MAX_LIMITS, Options, add_options, read_options
from llmc.quantized_compile import unread_codes
from llmc.targets.cpu_targets import x86_64_v3
from llmc.targets.gpu_targets import sm_90
from llmc.targets.target import deterministic


def parse(*argv: str, command: str = "compile") -> Options:
    p = ArgumentParser()
    add_options(p, command)
    return read_options(p.parse_args(argv), Path("users/cache"))


def test_every_field_is_declared() -> None:
    assert {f.name for f in fields(Options)} == {*options_of(Options), "hub"}
    assert {f.name for f in fields(Hub)} == set(options_of(Hub))


def test_without_flags_the_defaults_of_python_hold() -> None:
    assert parse() == Options(cache=Path("users/cache"))
    assert parse(command="tune") == Options(cache=Path("users/cache"))


def test_flags_give_the_keywords() -> None:
    given = parse(
        "--target", "cuda:sm_90", "--dtype", "bfloat16", "--max-model-len", "64", "--max-num-seqs", "4",
        "--layers", "2", "--max-num-batched-tokens", "32", "--pipeline", "serve", "--weights", "random:7",
        "--tuning", "t.jsonl", "--cache", "c", "--no-reuse", "--hub-endpoint", "http://hub", "--download-dir", "d",
        "--offline",
    )  # fmt: skip
    assert given == Options(
        target="cuda:sm_90", dtype="bfloat16", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, layers=2,
        pipeline="serve", weights="random:7", tuning=Path("t.jsonl"), cache=Path("c"), reuse=False,
        hub=Hub("http://hub", Path("d"), True),
    )  # fmt: skip
    assert parse("--cache", "c", "--no-cache").cache is None


@pytest.mark.parametrize("value", ["ngram", "ngram:4", "draft", '{"method": "ngram"}', "2.5", ""])
def test_speculate_takes_a_number_of_tokens(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--speculate", value)
    said = capsys.readouterr().err
    assert f"{value!r} is not a number of drafted tokens" in said and "compile with --speculate 4" in said


def test_an_artifact_records_what_determines_its_contents() -> None:
    recorded = Options(tuning=Path("t"), cache=Path("c"), reuse=False, hub=Hub(offline=True)).recorded()
    assert recorded == Options().recorded()
    assert set(recorded) == {n for n, o in options_of(Options).items() if o.group != FILES}
    assert {"target", "dtype", "weights", "layers", "pipeline"} <= set(recorded)


@pytest.mark.parametrize("value", ["f32", "float16", "", None, ["auto"]])
def test_a_value_that_is_no_choice_is_refused(value: Any, tmp_path: Path) -> None:
    """A flag's parser refuses it; a keyword of Python must be refused, too, as it would be ignored."""
    with pytest.raises(LlmcError, match=r"E201.*dtype = .* is not allowed"):
        start(tmp_path / "nothing", tmp_path / "out", Options(dtype=value), False, Quiet())


@pytest.mark.parametrize("name", MAX_LIMITS)
def test_limits_are_refused_before_the_model_is_traced(name: str, tmp_path: Path) -> None:
    with pytest.raises(LlmcError, match=f"E201.*{name} = {MAX_LIMITS[name] + 1} is too large"):
        start(tmp_path / "nothing", tmp_path / "out", Options(**{name: MAX_LIMITS[name] + 1}), False, Quiet())


def test_help_names_the_targets_of_the_registry(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = "".join(capsys.readouterr().out.split())
    assert all(name in shown for name in EXTENSION.targets)


@pytest.mark.parametrize(
    ("weights", "config", "noted"),
    [
        ("none", {"quantization_config": {"quant_method": "gptq"}}, True),
        ("random:1", {"quantization_config": {"quant_method": "gptq"}}, True),
        ("packed", {"quantization_config": {"quant_method": "gptq"}}, False),
        ("none", {}, False),
    ],
)
def test_codes_that_a_compile_does_not_read_are_noted(weights: str, config: dict[str, Any], noted: bool) -> None:
    traced = SimpleNamespace(source=SimpleNamespace(config=config), facts=SimpleNamespace(dtype="bf16"))
    note = unread_codes(weights, traced)
    assert (note is not None) == noted
    assert note is None or (f"--weights {weights}" in note and "are bf16" in note)


@pytest.mark.parametrize(
    "node, rows", [("causal_conv(%x, %w, %p) {layer=0}", RECURRENT_ROWS), ("mul(%x, %x)", sm_90().rows)]
)
def test_models_with_recurrent_layers_run_fewer_sequences_by_default(node: str, rows: int) -> None:
    """Each sequence has a state in each of their layers."""
    inputs = "%x: bf16[T, 8], %w: weight bf16[8, 4], %p: i32[T]"
    text = f"sym T in [1, 64]\ngraph @main({inputs}) {{\n  %y = {node} : bf16[T, 8]\n  return %y\n}}\n"
    main = parse_ir(text, OPS).graphs["main"]
    assert default_rows(sm_90(), main) == rows
    assert default_rows(deterministic(sm_90(), 0), main) == 256
    assert default_rows(x86_64_v3(), main) == x86_64_v3().rows
