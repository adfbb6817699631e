"""Custom torch ops that stand for attention, experts, rotary tables and recurrent layers in a trace.

They have a schema and the shapes of their results, but no implementation, because a trace is never run. They are called
as `torch.ops.llmc.NAME`; `llmc.frontend.aten_table` has their lowerings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, library


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


def _rope_tables(inv_freq: Tensor, positions: Tensor, scaling: float, layout: str, dtype: torch.dtype) -> Any:
    width = inv_freq.shape[0] * (1 if layout == "half" else 2)
    return tuple(inv_freq.new_empty((*positions.shape, width), dtype=dtype) for _ in range(2))


# The schema of each op -> a function that returns its results without values.
OPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        # q [1,H,T,D], k [1,G,T,D], v [1,G,T,E], sinks [H] -> [1,T,H,E]
        "attention(Tensor q, Tensor k, Tensor v, SymInt layer, float scale, SymInt window, float softcap, "
        "Tensor? sinks=None, bool causal=True) -> Tensor": _attention,
        # the same, and slopes [H]
        "alibi_attention(Tensor q, Tensor k, Tensor v, Tensor slopes, SymInt layer, float scale) -> Tensor": _attention,
        # x [t,d], idx and weights [t,k], gate_up [e,2i,d], down [e,d,i], biases [e,2i] and [e,d] -> [t,d]; without a
        # gate, gate_up [e,i,d] and its bias [e,i]
        "moe(Tensor x, Tensor idx, Tensor weights, Tensor gate_up, Tensor down, str body, Tensor? gate_bias=None, "
        "Tensor? down_bias=None) -> Tensor": lambda x, *_, **__: torch.empty_like(x),
        # inv_freq [h], positions [1,T] -> cos and sin, each [1,T,h] (layout "half") or [1,T,2h] ("twice", "pairs")
        "rope_tables(Tensor inv_freq, Tensor positions, float scaling, str layout, ScalarType dtype) "
        "-> (Tensor, Tensor)": _rope_tables,
        # x [1,T,C], weight [C,W], bias [C] -> [1,T,C]
        "causal_conv(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor": lambda x, *_, **__: torch.empty_like(x),
        # q and k [1,T,G,D], v [1,T,H,E], decay [1,T,H] or [1,T,H,D] and beta [1,T,H] in f32 -> [1,T,H,E]. With eps > 0,
        # q and k are divided by the root of their sum of squares and eps. q is multiplied by `scale`.
        "linear_recurrence(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta=None, float scale=1.0, "
        "float eps=0.0) -> Tensor": lambda q, k, v, *_, **__: torch.empty_like(v),
    }
)


def declare() -> None:
    """Declare the ops to torch. Repeated calls are harmless."""
    for schema, results in OPS.items():
        name, parameters = schema.split("(", 1)
        if not hasattr(torch.ops.llmc, name):
            library.define(f"llmc::{name}", f"({parameters}", tags=torch.Tag.pt2_compliant_tag)
            library.register_fake(f"llmc::{name}", results)
