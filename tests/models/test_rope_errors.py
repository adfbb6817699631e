"""Rope parameters of a config that cannot be compiled: each gives one Diagnostic with its cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models.cases import rope
from models.test_errors import config, fails

from llmc.frontend.trace_model import trace


@pytest.mark.parametrize("entry", [{"rope_scaling": {"type": "wobbly", "factor": 2.0}}, rope("wobbly", factor=2.0)])
def test_rope_type(entry: dict[str, Any], tmp_path: Path) -> None:
    fails("E306", "'wobbly'", "llama3", do=lambda: trace(config(tmp_path, **entry)))


@pytest.mark.parametrize("name", ["mrope", "su"])
def test_an_older_rope_type_of_other_models(name: str, tmp_path: Path) -> None:
    """Only the models that were published with these names map them to newer ones."""
    scaling = {"type": name, "mrope_section": [4, 2, 2], "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    fails("E306", repr(name), "known types", do=lambda: trace(config(tmp_path, rope_scaling=scaling)))


@pytest.mark.parametrize("value", ["2.0", True, [2.0]])
def test_numbers_of_a_rope(value: Any, tmp_path: Path) -> None:
    fails("E302", "factor of the rope", "number", do=lambda: trace(config(tmp_path, **rope("linear", factor=value))))


def test_positions(tmp_path: Path) -> None:
    dynamic = config(tmp_path, **rope("dynamic", factor=4.0))
    fails("E306", "dynamic", "256", "512", do=lambda: trace(dynamic, max_positions=512))


def test_a_rope_that_rotates_no_pair_of_columns(tmp_path: Path) -> None:
    """A tenth of 16 columns is one column, which is half a pair."""
    yarn = rope("yarn", factor=2.0, original_max_position_embeddings=32, partial_rotary_factor=0.1)
    entries = {"model_type": "stablelm", "architectures": ["StableLmForCausalLM"], **yarn}
    fails("E306", "no frequencies", "partial_rotary_factor", do=lambda: trace(config(tmp_path, **entries)))


def test_frequencies_that_are_not_finite(tmp_path: Path) -> None:
    for entry in (rope("linear", factor=0.0), {"rope_theta": 0}):
        fails("E306", "not finite", "rope_theta", do=lambda entry=entry: trace(config(tmp_path, **entry)))
