"""Python literals are converted to JSON as Python reads them, however they are divided into pieces."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

import pytest

pytest.importorskip("starlette")
from hypothesis import given, settings
from hypothesis import strategies as st
from llmc_runtime.server.tool_calls.python_literals import PythonText
from llmc_runtime.server.tool_calls.text_values import ScannedText


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False,
        allow_infinity=False) | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=9,
    ),
    st.text(max_size=2), st.integers(0, 1000),
)  # fmt: skip
def test_python_is_read_as_python_reads_it(value: Any, damage: str, at: int) -> None:
    """Damaged literals are refused, or have the same value, also of a text in two pieces."""

    def python_json(text: str) -> str | None:
        found = list[str | None]()
        for pieces in ((text,), (text[:at], text[at:])):
            scan = ScannedText(PythonText())
            for piece in pieces:
                scan.push(piece)
            found.append(scan.json())
        assert found[0] == found[1]
        return found[0]

    for text in (repr(value), json.dumps(value)):
        found = python_json(text)
        assert found is not None and json.loads(found) == value
    text = repr(value)
    at %= len(text) + 1
    text = text[:at] + damage + text[at:]
    found = python_json(text)
    try:
        with warnings.catch_warnings(action="ignore"):
            real = ast.literal_eval(text.strip(" \t\r\n"))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return
    assert found is None or json.loads(found) == real
