"""The functions that replace those of transformers' recurrent layers while a model is traced.

transformers' recurrent layers call functions of their modelling module: `causal_conv1d_fn` for the convolution along
the sequence, and one of a few functions for the recurrence. While a model is traced, ours replace them, by name, in
every module that its classes come from.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from llmc.diagnostics import Diagnostic
from llmc.frontend.legacy_attention import replaced

EPS = 1e-6  # epsilon of the norms of queries and keys in transformers and flash-linear-attention


def _conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **more: Any
) -> Tensor:
    """Compute the convolution of hidden_states [1,C,T] by weight [C,W], and an activation."""
    out = torch.ops.llmc.causal_conv(hidden_states.transpose(1, 2).to(weight.dtype), weight, bias)
    out = out if activation is None else ACT2FN[activation](out)
    return out.to(hidden_states.dtype).transpose(1, 2)


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, use_qk_l2norm_in_kernel: bool = False,
    **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute the gated delta rule of query and key [1,T,G,D], value [1,T,H,E], g [1,T,H] or, for each channel of a
    key, [1,T,H,D], and beta [1,T,H]; no state is returned.
    """
    k, v = key.to(query.dtype), value.to(query.dtype)
    eps, scale = EPS if use_qk_l2norm_in_kernel else 0.0, query.shape[-1] ** -0.5
    return torch.ops.llmc.linear_recurrence(query, k, v, g.float(), beta.float(), scale, eps), None


def _mamba2(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, torch.inf), **more: Any,
) -> Tensor:  # fmt: skip
    """Compute Mamba-2's scan: hidden_states [1,T,H,E], dt [1,T,H], A, D [H], B, C [1,T,G,D] -> f32 [1,T,H,E]."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    low, high = dt_limit
    if low > 0 or high < torch.inf or not dt_softplus:
        dt = torch.clamp(dt, min=low, max=None if high == torch.inf else high)
    dtype, x, dt = hidden_states.dtype, hidden_states.float(), dt.float()
    v = (x * dt[..., None]).to(dtype)
    out = torch.ops.llmc.linear_recurrence(C.to(dtype), B.to(dtype), v, A.float() * dt).float()
    return out if D is None else out + D[..., None] * x


def _mamba1(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, delta_bias: Tensor | None = None, delta_softplus: bool = False, **more: Any,
) -> Tensor:  # fmt: skip
    """Compute the scan of Mamba-1: hidden_states, dt, z [1,H,T], A [H,N], B, C [1,N,T], D, delta_bias [H] -> [1,H,T].

    Each channel is a head with one value and N elements of a key, each of which decays at a rate of its own.
    """
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[..., None]
    dt = torch.nn.functional.softplus(dt) if delta_softplus else dt
    dtype, x, dt = hidden_states.dtype, hidden_states.transpose(1, 2), dt.transpose(1, 2).float()
    q, k = (factor.transpose(1, 2).unsqueeze(2).to(dtype) for factor in (C, B))
    v = (x.float() * dt).to(dtype).unsqueeze(-1)
    out = torch.ops.llmc.linear_recurrence(q, k, v, dt[..., None] * A.float()).squeeze(-1)
    if D is not None:
        out = out + x * D
    if z is not None:
        out = out * torch.nn.functional.silu(z.transpose(1, 2))
    return out.transpose(1, 2)


# By the name of a function of modelling modules: the function that replaces it.
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "causal_conv1d_fn": _conv,
        "chunk_kimi_delta_attention": _delta_rule,
        "mamba2_chunk_scan": _mamba2,
        "mamba_selective_scan": _mamba1,
        "torch_chunk_gated_delta_rule": _delta_rule,
    }
)
IGNORED = frozenset({"chunk_size", "use_mambapy", "use_associative_scan"})  # arguments that do not change results
# The same of single modelling modules. Zamba2 passes its attention's rotary tables on to layers that do not read them.
IGNORED_IN: Mapping[str, frozenset[str]] = MappingProxyType(
    {"transformers.models.zamba2.modeling_zamba2": frozenset({"position_embeddings"})}
)


@contextmanager
def llmc_recurrence(model: torch.nn.Module) -> Iterator[None]:
    """Within this context, the recurrent layers of a model are traced as our ops; raises Diagnostic E305."""
    with ExitStack() as stack:
        for module in {sys.modules[type(m).__module__] for m in model.modules()}:
            for name in FUNCTIONS.keys() & vars(module).keys():
                ignored = IGNORED | IGNORED_IN.get(module.__name__, frozenset())
                stack.enter_context(replaced(vars(module), name, _checked(name, vars(module)[name], ignored)))
        yield


def _checked(name: str, original: Callable[..., Any], ignored: frozenset[str] = IGNORED) -> Callable[..., Any]:
    """Return our replacement of a modelling module's function; it raises Diagnostic E305 for arguments that are neither
    supported nor `ignored`.
    """
    ours = FUNCTIONS[name]
    known = {p for p, x in inspect.signature(ours).parameters.items() if x.kind is not x.VAR_KEYWORD}
    expected = inspect.signature(original)
    rest = next((p for p, x in expected.parameters.items() if x.kind is x.VAR_KEYWORD), "")

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(expected.bind(*args, **kwargs).arguments)
        arguments |= arguments.pop(rest, {})
        if surplus := sorted(
            k for k, x in arguments.items() if k not in known | ignored and x is not None and x is not False
        ):
            cause = f"{name} is called with {', '.join(surplus)}"
            raise Diagnostic("E305", cause, "only recurrent layers over whole prompts, without a cache, are supported")
        return ours(**{k: x for k, x in arguments.items() if k in known})

    return call
