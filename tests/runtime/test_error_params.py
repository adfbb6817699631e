"""The parameter that an error is about is a field of its own, which does not depend on the error's text."""

from __future__ import annotations

import pytest
from llmc_runtime.engine.messages import error_message, error_of
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.sched.parameter_type import refused

pytest.importorskip("starlette")
from llmc_runtime.server.http.errors import to_api_error


@pytest.mark.parametrize("remedy", ["", "use another: one", "top_p: at most 1"])
def test_the_param_of_a_response_is_that_of_the_error(remedy: str) -> None:
    """Also after the error came from the engine's process; an error without a parameter names none."""
    for param in ("", "temperature"):
        error = error_of(error_message(LlmcError("E601", "it is too hot", remedy, param)))
        assert to_api_error(error, "prompt").param == (param or None)


def test_refused_values_name_their_parameter() -> None:
    error = refused("top_p", 3, "a number above 0, up to 1")
    assert (error.code, error.param, error.remedy) == ("E601", "top_p", "top_p: a number above 0, up to 1")
