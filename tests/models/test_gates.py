"""Gates of experts, derived from the module's code, equal that code; other code is an error with the reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from draw import generator
from transformers.activations import ACT2FN

from llmc.diagnostics import Diagnostic
from llmc.frontend.expert_activation import Gate, read
from llmc.ir.ops.common import NUMPY
from llmc.ir.ops.moe import gate
from llmc.ir.scalar import evaluate

Fn = Callable[[torch.Tensor], torch.Tensor]


class Experts:
    """The parts of a module that `read` uses."""

    def __init__(self, fn: Fn, activation: Fn | None = None):
        self._apply_gate, self.act_fn = fn, activation


def halves(act: Fn) -> Fn:
    def fn(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return act(gate) * up

    return fn


def clamped(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=0.7), x[..., 1::2].clamp(min=-0.7, max=0.7)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def late(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).clamp(max=0.5) * up.clamp(-0.5, 0.5)


def value(found: Gate, x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    parts = (x[:, ::2], x[:, 1::2]) if found.interleaved else (x[:, :half], x[:, half:])
    return evaluate(gate(found.body), NUMPY, parts)


@pytest.mark.parametrize(
    ("fn", "interleaved"),
    [(halves(ACT2FN[k]), False) for k in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu")]
    + [(clamped, True), (late, False)],
)
def test_the_expression_is_the_code(fn: Fn, interleaved: bool) -> None:
    x = generator().standard_normal((5, 14)).astype(np.float32)
    found = read(Experts(fn))
    assert found.interleaved is interleaved
    np.testing.assert_allclose(value(found, x), fn(torch.from_numpy(x)).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (halves(lambda x: x.softmax(-1)), "row_max"),
        (lambda x: x[..., 1:4] * x[..., 3:], "are neither gate nor up"),
        (lambda x: x[..., ::2] * x[..., 3:], "the order of gate and up is unknown"),
        (halves(torch.special.bessel_j0), "special_bessel_j0"),
    ],
)
def test_functions_that_are_no_gates_are_refused(fn: Fn, words: str) -> None:
    with pytest.raises(Diagnostic, match=words) as e:
        read(Experts(fn))
    assert e.value.code == "E305" and "Experts" in str(e.value)


@pytest.mark.parametrize("name", ["prelu", "xielu"])
def test_an_activation_with_weights_is_refused(name: str) -> None:
    activation = ACT2FN[name]
    with pytest.raises(Diagnostic, match=rf"E305.*{type(activation).__name__} has weights of its own"):
        read(Experts(halves(activation), activation))
