"""The commands `llmc ops` and `llmc passes`."""

from __future__ import annotations

import io
import json

import pytest

from llmc.cli import main


def run(*args: str) -> str:
    out = io.StringIO()
    assert main(list(args), out) == 0
    return out.getvalue()


def test_tables_print_json_too() -> None:
    ops = json.loads(run("ops", "--json"))
    assert {"linear", "paged_attention"} <= {o["name"] for o in ops}
    assert "x @ w.T" in run("ops", "linear")
    passes = json.loads(run("passes", "--json"))
    assert "fuse-norm" in {p["name"] for p in passes["passes"]} and "serve" in passes["pipelines"]
    assert "split-kv" in passes["serve"]["cuda:sm_90"] and "split-kv" not in passes["serve"]["cpu:native"]
    output = run("passes")
    assert "serve of cuda:sm_80, hip:gfx90a, hip:gfx950:" in output and "serve of hip:gfx942:" in output
    assert "serve of cuda:sm_90, cuda:sm_100:" in output
    assert "split-single" in passes["serve"]["cuda:sm_90"] and "split-single" not in passes["serve"]["cuda:sm_80"]


def test_passes_are_listed_by_a_line_and_printed_in_full() -> None:
    (line,) = [line for line in run("passes").splitlines() if line.startswith("fuse-norm ")]
    (fuse_norm,) = json.loads(run("passes", "fuse-norm", "--json"))["passes"]
    summary, *rest = fuse_norm["doc"].splitlines()
    assert line.endswith(summary) and rest
    full = run("passes", "fuse-norm", "gather-experts")
    assert all(text in full for text in (*filter(None, rest), "\ngather-experts\n", "  option tokens = "))


def test_an_unknown_pass_is_refused_with_a_similar_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", "fuse-nrm"]) == 1
    printed = capsys.readouterr().err
    assert "E420" in printed and "no pass 'fuse-nrm'" in printed and "fuse-norm" in printed
