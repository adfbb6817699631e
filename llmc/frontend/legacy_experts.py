"""Experts of model families that do not use transformers' ExpertsInterface, as the op `moe`: one table entry each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from llmc.frontend.attention_interface import GATE

SPARE = "llmc_spare"  # attribute of modules: the full sizes of stacks of which only the first experts are read


@dataclass(frozen=True)
class Experts:
    """How a class computes its experts.

    gate(module, gate_up [t, 2i]) -> [t, i] is their activation; None: the class's own `_apply_gate`. forward(module,
    ...) replaces the class's own forward and calls the op `moe`, with gate rows before up rows. `rows` names the stacks
    that the class makes too large, and for each the attribute with the number of experts that are read; publishers
    store only these.
    """

    gate: Callable[[Any, Tensor], Tensor] | None
    forward: Callable[..., Any]
    rows: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def trim(model: torch.nn.Module) -> None:
    """Reduce stacks to the experts that are read; modules keep the full sizes as SPARE, name -> experts."""
    for module in model.modules():
        rule = TABLE.get(type(module).__name__)
        if rule is None:
            continue
        for name, count in rule.rows.items():
            stack = module.get_parameter(name)
            setattr(module, name, torch.nn.Parameter(stack[: getattr(module, count)]))
            setattr(module, SPARE, getattr(module, SPARE, {}) | {name: stack.shape[0]})


def spare_stacks(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Yield the names of the stacks that were made smaller, and their full sizes, which some checkpoints have."""
    for path, module in model.named_modules():
        for name, count in getattr(module, SPARE, {}).items():
            yield f"{path}.{name}", count


def patch(model: torch.nn.Module) -> None:
    """Replace the forward of the modules whose class is in the table; to be called before gates are read."""
    for module in model.modules():
        if (rule := TABLE.get(type(module).__name__)) is not None:
            if rule.gate is not None:
                module._apply_gate = partial(rule.gate, module)
            module.forward = partial(rule.forward, module)


def _gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return activation(gate) * up


def _llama4(moe: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Compute experts whose scores multiply their inputs, not their outputs."""
    x = hidden.reshape(-1, moe.hidden_dim)
    logits = torch.nn.functional.linear(x, moe.router.weight)
    top, index = torch.topk(logits, moe.top_k, dim=1)
    scores = torch.sigmoid(top.float()).to(x.dtype)
    gate_up, down = (w.transpose(1, 2) for w in (moe.experts.gate_up_proj, moe.experts.down_proj))
    out = moe.shared_expert(x)
    for k in range(moe.top_k):
        score = scores[:, k : k + 1]
        chosen = index[:, k : k + 1]
        ones = torch.ones_like(score)
        out = out + torch.ops.llmc.moe(x * score, chosen, ones, gate_up, down, getattr(moe, GATE).body)
    return out, logits


def _dbrx(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    shape = (experts.num_experts, experts.ffn_hidden_size, experts.hidden_size)
    gate, up, down = (w.view(shape) for w in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2))
    x = hidden.reshape(-1, experts.hidden_size)
    gate_up = torch.cat((gate, up), 1)
    out = torch.ops.llmc.moe(x, index, weights, gate_up, down.transpose(1, 2), getattr(experts, GATE).body)
    return out.view(hidden.shape)


def _aria(experts: Any, hidden: Tensor, logits: Tensor) -> Tensor:
    index, weights = experts.route_tokens_to_experts(logits)
    gate_up, down = (w.weight.transpose(1, 2) for w in (experts.fc1, experts.fc2))
    return torch.ops.llmc.moe(hidden, index, weights, gate_up, down, getattr(experts, GATE).body)


def _plain(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Call the op with the weights as they are."""
    return torch.ops.llmc.moe(
        hidden, index, weights, experts.gate_up_proj, experts.down_proj, getattr(experts, GATE).body
    )


def _some_identities(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts of which only the first have weights; the others return their inputs."""
    count = experts.num_routed_experts
    routed = index < count
    chosen = torch.where(routed, index, torch.zeros_like(index))
    scores = torch.where(routed, weights, torch.zeros_like(weights))
    body = getattr(experts, GATE).body
    out = torch.ops.llmc.moe(hidden, chosen, scores, experts.gate_up_proj, experts.down_proj, body)
    return out + (hidden * (weights - scores).sum(-1, keepdim=True)).to(hidden.dtype)


TABLE: Mapping[str, Experts] = MappingProxyType(
    {
        "AriaExperts": Experts(lambda m, x: _gated(torch.nn.functional.silu, x), _aria),
        "DbrxExperts": Experts(lambda m, x: _gated(m.mlp.activation_fn, x), _dbrx),
        "Llama4TextMoe": Experts(lambda m, x: _gated(m.experts.act_fn, x), _llama4),
        "LongcatFlashExperts": Experts(
            lambda m, x: _gated(m.act_fn, x), _some_identities, {"gate_up_proj": "num_routed_experts"}
        ),
        "Step3p7Experts": Experts(None, _plain),
    }
)
