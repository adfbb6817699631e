"""The functions that replace those of recurrent layers: which arguments they ignore, and which they refuse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from llmc.diagnostics import Diagnostic
from llmc.frontend.recurrent_interface import IGNORED_IN, llmc_recurrence
from llmc.frontend.traced_ops import declare


def mamba2_chunk_scan(
    hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, **kwargs: Any
) -> torch.Tensor:  # fmt: skip
    """Stands for the function of a modelling module."""
    raise AssertionError("it is replaced")


def scan_in(module: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> torch.Tensor:
    """Call the scan of a recurrent layer of a modelling module with this name, as its model is traced."""
    modelling: Any = ModuleType(module)
    modelling.mamba2_chunk_scan = mamba2_chunk_scan
    monkeypatch.setitem(sys.modules, module, modelling)
    layer = type("Layer", (torch.nn.Module,), {"__module__": module})()
    declare()
    with llmc_recurrence(layer), torch.device("meta"):
        x, dt, a, bc = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2), torch.ones(2), torch.ones(1, 3, 1, 5)
        scan: Callable[..., torch.Tensor] = modelling.mamba2_chunk_scan
        return scan(x, dt, a, bc, bc, 16, **more)


def test_only_zamba2_may_pass_positions_to_a_recurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence that rotates its queries would otherwise be traced without its positions."""
    tables = torch.ones(3, 4), torch.ones(3, 4)
    (zamba2,) = IGNORED_IN
    assert scan_in(zamba2, monkeypatch, position_embeddings=tables).shape == (1, 3, 2, 4)
    with pytest.raises(Diagnostic, match="E305: mamba2_chunk_scan is called with position_embeddings"):
        scan_in("modeling_rotated", monkeypatch, position_embeddings=tables)
    assert scan_in("modeling_rotated", monkeypatch, position_embeddings=None).shape == (1, 3, 2, 4)
