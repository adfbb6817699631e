"""The built-in op set: all ops declared in this package, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType, ModuleType

from llmc.ir.opdef import OpDef
from llmc.ir.ops import (
    attention,
    block_scaled,
    comm,
    draft,
    latent,
    linear,
    moe,
    norm,
    packed,
    packed_codes,
    packed_quantized,
    pointwise,
    pooling,
    quantize,
    quantized_linear,
    quantized_moe,
    recurrent,
    recurrent_chunks,
    reduce,
    rope,
    sample,
    shape,
    state,
)


def ops_of(module: ModuleType) -> tuple[OpDef, ...]:
    """Return the ops that a module declares, in their order; not those that it imports."""
    return tuple(v for v in vars(module).values() if isinstance(v, OpDef) and v.ref.__module__ == module.__name__)


def op_set(*groups: Iterable[OpDef]) -> Mapping[str, OpDef]:
    """Return an immutable mapping from names to ops; raises ValueError if two ops share a name."""
    out: dict[str, OpDef] = {}
    for o in (o for group in groups for o in group):
        if out.setdefault(o.name, o) is not o:
            raise ValueError(f"two ops have the name {o.name!r}")
    return MappingProxyType(out)


GROUPS = (
    pointwise, reduce, shape, linear, packed, quantize, quantized_linear, block_scaled, packed_quantized, packed_codes,
    norm, rope, attention, latent, moe, quantized_moe, state, recurrent, recurrent_chunks, pooling, sample, draft, comm,
)  # fmt: skip
OPS = op_set(*map(ops_of, GROUPS))
