"""`llmc compile --kv-cache-dtype`: the dtype of the KV cache, and the scales of caches of 8-bit floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np

from llmc.codegen.candidates import candidates
from llmc.codegen.tuning_records import Tuning
from llmc.diagnostics import Diagnostic
from llmc.extension import Registry
from llmc.ir.graph import Graph
from llmc.ir.types import state, tensor
from llmc.ir.weight_eval import WeightSource
from llmc.passes.base import Pass
from llmc.passes.lower.page_attention import F8, FNUZ, KV_SCALES
from llmc.passes.pipeline import override, require
from llmc.targets.target import Target

# --kv-cache-dtype -> dtype of the pools
KV_DTYPES: Mapping[str, str] = MappingProxyType({"bf16": "bf16", "bfloat16": "bf16", "fp8": F8, "fp8_e4m3": F8})
_REMEDY = "use --kv-cache-dtype auto, or --target hip:gfx942, hip:gfx950, or cuda:sm_90 or later"


def kv_dtype(option: str, stored: str, target: Target, registry: Registry) -> tuple[str, str]:
    """Return the dtype of the KV cache ("": that of the activations), and a note if the target lacks `stored`.

    `option` is --kv-cache-dtype; with "auto", the dtype is `stored`, for which the checkpoint was made. If the target
    has other 8-bit floats, they are used instead. Raises Diagnostic E511 if the option names a dtype for which the
    target has no kernels.
    """
    dtype = KV_DTYPES.get(option, stored)
    why = _unsupported(dtype, target, registry) if dtype else None
    if why is None:
        return dtype, ""
    if dtype == F8 and _unsupported(FNUZ, target, registry) is None:
        return FNUZ, ""
    if option in KV_DTYPES:
        raise Diagnostic("E511", f"{target.name} cannot hold a KV cache in {option}: {why}", _REMEDY)
    return "", f"the KV cache is not quantised: the checkpoint requests {dtype}, which {target.name} does not support"


def _unsupported(dtype: str, target: Target, registry: Registry) -> str | None:
    """Return why no kernel of the target appends to pools of the dtype, or None."""
    g, ops = Graph("main"), registry.opset()
    operands = [state(dtype, "P", 2, 1, 16, 64), tensor("bf16", 1, 1, 64), tensor("bf16", 1, 1, 64), tensor("i32", 1)]
    operands += [tensor("f32", 2)] if dtype in (F8, FNUZ) else []
    inputs = [g.input(f"x{i}", t) for i, t in enumerate(operands)]
    node = g.add(ops["kv_append"], inputs)
    try:
        candidates(node, registry.kernels, target, {}, Tuning())
    except Diagnostic as error:
        return error.cause
    return None


def with_kv_dtype(passes: Sequence[Pass], dtype: str) -> list[Pass]:
    """Set the dtype of the pass `page-attention`; raises Diagnostic E421 if it is needed and missing."""
    if not dtype:
        return list(passes)
    require(passes, "page-attention", "--kv-cache-dtype")
    return override(passes, "page-attention", kv=dtype)


class ScaledSource(WeightSource, Protocol):
    """A source of weights with the scales of the KV cache: layer -> (of keys, of values)."""

    kv_scales: Mapping[int, tuple[np.ndarray, np.ndarray]]


class WithKvScales:
    """Weights, and the scales of KV pools in float32 by the names that `page-attention` gives them."""

    def __init__(self, source: ScaledSource, graph: Graph, prefix: str = ""):
        """Serve the scales that `graph` reads by names that begin with `prefix`, ones for layers without scales."""
        self.source = source
        unit = np.ones((), np.float32)
        self.scales: dict[str, np.ndarray] = {}
        for v in graph.inputs:
            if v.name.startswith(prefix + KV_SCALES):
                name = v.name.removeprefix(prefix)
                layer, size = int(name.removeprefix(KV_SCALES)), int(v.type.shape[0])
                pair = source.kv_scales.get(layer, (unit, unit))
                self.scales[name] = np.concatenate([_spread(x, size // 2, layer) for x in pair])

    @property
    def note(self) -> str:
        """A sentence about the scales; "" if the graph reads none."""
        if not self.scales:
            return ""
        layers = {int(name.removeprefix(KV_SCALES)) for name in self.scales}
        if not layers & self.source.kv_scales.keys():
            return "KV cache in 8-bit floats with a scale of 1, because the checkpoint has no scales for it"
        if lacking := sorted(layers - self.source.kv_scales.keys()):
            return f"KV cache in 8-bit floats with the checkpoint's scales; layers without scales: {lacking}"
        return "KV cache in 8-bit floats with the checkpoint's scales"

    def read(self, name: str, rows: slice) -> np.ndarray:
        """Return rows of a weight or of scales."""
        return self.scales[name][rows] if name in self.scales else self.source.read(name, rows)


def _spread(scale: np.ndarray, heads: int, layer: int) -> np.ndarray:
    """Return one scale per head; raises Diagnostic E341 if there is another number of them."""
    if scale.shape not in ((), (heads,)):
        cause = f"layer {layer} has {heads} KV heads and {len(scale)} scales of its KV cache"
        raise Diagnostic("E341", cause, "download the checkpoint again")
    return np.broadcast_to(scale, (heads,)).astype(np.float32)
