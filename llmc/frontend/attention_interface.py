"""The functions that transformers calls through its attention, mask and experts interfaces while a model is traced."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from llmc.diagnostics import Diagnostic
from llmc.frontend import expert_activation, traced_ops
from llmc.frontend.config_limits import chunk_size

GATE = "llmc_gate"  # attribute of an experts module that stores its Gate
ENCODER = "llmc_encoder"  # attribute of a module whose attention may be bidirectional
NAME = "llmc"

# Extra arguments that models pass to the attention function and that do not change its result.
HARMLESS = frozenset(
    {
        "position_ids", "use_cache", "cache_position", "logits_to_keep",
        "output_attentions", "output_hidden_states", "output_router_logits",
    }
)  # fmt: skip


@dataclass(frozen=True)
class MaskTag:
    """A placeholder for an attention mask, which passes the requested window to the attention hook.

    In sparse attention, it also stands for the selection of keys, which selects all of them.
    """

    window: int | None = None

    def to(self, *_: Any) -> "MaskTag":
        """Return the tag: models convert masks to other dtypes."""
        return self

    def __getitem__(self, _: Any) -> "MaskTag":
        """Return the tag: models pass parts of masks on."""
        return self


def register() -> None:
    """Declare our ops, and register the hooks with transformers as "llmc". Repeated calls are harmless."""
    traced_ops.declare()
    AttentionInterface.register(NAME, _attention_hook)
    AttentionMaskInterface.register(NAME, _mask_hook)
    ExpertsInterface.register(NAME, _experts_hook)


def _mask_hook(*_: Any, **kw: Any) -> MaskTag:
    if kw.get("use_vmap"):
        raise Diagnostic("E305", "the model uses its own attention mask", _CAUSAL)
    if kw.get("local_size") and getattr(kw.get("config"), "attention_chunk_size", None) == kw["local_size"]:
        if chunk_size(kw["config"]) != kw["local_size"]:
            raise Diagnostic("E305", f"the model attends in chunks of {kw['local_size']} tokens", _CAUSAL)
        return MaskTag()  # a sequence is at most one chunk
    return MaskTag(kw.get("local_size"))  # checked where a layer uses it: qwen2_moe makes a mask of width 0 for none


_CAUSAL = "only causal attention, with or without a sliding window, is supported"


def _attention_hook(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers' models call. Some pass arguments by name, so these names are fixed."""
    name, mask = type(module).__name__, attention_mask
    passed = {k for k, x in extra.items() if x is not None and not isinstance(x, MaskTag)}
    if unknown := sorted(passed - HARMLESS):
        raise Diagnostic(
            "E305", f"{name} passes {', '.join(unknown)} to its attention, which is not supported", _CAUSAL
        )
    causal = is_causal is not False and getattr(module, "is_causal", True) is not False
    check_causal(name, causal or hasattr(module, ENCODER), mask)
    # Eager attention applies the window through its mask, so a mask's window takes precedence over the argument.
    window = checked_window(mask.window if isinstance(mask, MaskTag) else sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = getattr(module, ENCODER, getattr(module, "layer_idx", None))
    if not isinstance(layer, int):
        raise Diagnostic("E305", f"{name} has no layer number (layer_idx)", _CAUSAL)
    if window and not causal:
        raise Diagnostic("E305", f"{name} attends to later tokens within a window", _CAUSAL)
    out = torch.ops.llmc.attention(query, key, value, layer, float(scale), window, float(softcap or 0), s_aux, causal)
    return out, None


def checked_window(width: int | None) -> int:
    """Return the width of a sliding window in tokens; 0 for None, which is attention without a window.

    Raises Diagnostic E305 for a width below 1: a token would not even attend to itself, and transformers' own
    attention fails.
    """
    if width is None:
        return 0
    if width < 1:
        remedy = "set the width of the window in config.json, and use_sliding_window to true if the model has it; "
        remedy += "sliding_window: null is attention to all earlier tokens"
        raise Diagnostic("E305", f"the model attends within a sliding window of {width} tokens", remedy)
    return int(width)


def check_causal(name: str, causal: bool, mask: Any) -> None:
    """Raise Diagnostic E305 if an attention is not causal or passes its own mask."""
    if not causal or isinstance(mask, Tensor):
        raise Diagnostic("E305", f"{name} is not a causal attention", _CAUSAL)


def mark_encoder(model: torch.nn.Module) -> None:
    """Allow bidirectional attention in a model's modules, and number the modules without a layer number."""
    for number, module in enumerate(m for m in model.modules() if hasattr(m, "is_causal")):
        setattr(module, ENCODER, number)


def read_gates(model: torch.nn.Module) -> None:
    """Store the Gate of every experts module on the module, before tracing; raises Diagnostic E305."""
    for path, module in model.named_modules():
        if hasattr(module, "_apply_gate"):
            try:
                setattr(module, GATE, expert_activation.read(module))
            except Diagnostic as e:
                raise Diagnostic(e.code, e.cause, e.remedy, loc=path) from e


def _experts_hook(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Call the moe op with weights as [experts, out, in] and gate rows first, rearranged by ordinary ops on weights."""
    gate = getattr(module, GATE)
    first = "gate_up_proj" if expert_activation.has_gate(module) else "up_proj"
    gate_up, down = getattr(module, first), module.down_proj
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    biases = (getattr(module, f"{first}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    if gate.interleaved:
        gate_up, biases = _gate_rows_first(gate_up), (_gate_rows_first(biases[0]), biases[1])
    return torch.ops.llmc.moe(hidden, index, weights, gate_up, down, gate.body, *biases)


def _gate_rows_first(x: Tensor | None) -> Tensor | None:
    """Reorder rows [experts, rows, ..] of gate and up that alternate: first all of gate, then all of up."""
    return None if x is None else torch.cat((x[:, ::2], x[:, 1::2]), 1)
