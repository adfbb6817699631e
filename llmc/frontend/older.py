"""Families that pick an attention class by name, from before AttentionInterface: their flash class is taken, whose one
call of `_flash_attention_forward` is ours while a model is traced. Which families is data; no model code is here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import hooks

# Whose flash class computes what their eager class does. (gpt_neo's forgets the windows of its local layers.)
FAMILIES = frozenset({"falcon", "gptj"})

CALL = "_flash_attention_forward"


@contextmanager
def taken_in(model_type: str) -> Iterator[None]:
    """Within, such a family is built and traced with our attention; for others nothing happens."""
    if model_type not in FAMILIES:
        yield
        return
    module: Any = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    classes = next(v for k, v in vars(module).items() if k.endswith("_ATTENTION_CLASSES"))
    asked = torch.is_autocast_enabled  # refuses to answer for the meta device, where nothing is cast
    with (
        replaced(classes, hooks.NAME, classes["flash_attention_2"]),
        replaced(vars(module), CALL, _attention),
        replaced(vars(torch), "is_autocast_enabled", lambda device=None: device != "meta" and asked(device or "cuda")),
        _Slices(),
    ):
        yield


class _Slices(TorchFunctionMode):
    """x[..., [k], :] is x[..., k:k+1, :], whose meaning needs no tensor of indices: those have no value on meta."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(slice(*_span(i[0])) if _is_one(i) else i for i in args[1]))
        return func(*args, **(kwargs or {}))


def _is_one(index: Any) -> bool:
    return isinstance(index, list) and len(index) == 1 and type(index[0]) is int


def _span(k: int) -> tuple[int, int | None]:
    return k, None if k == -1 else k + 1


@contextmanager
def replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Within, a name of a module or an entry of a table is another one."""
    absent = object()
    before = names.get(name, absent)
    names[name] = value
    try:
        yield
    finally:
        if before is absent:
            del names[name]
        else:
            names[name] = before


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    query_length: int,
    is_causal: bool = True,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **extra: Any,
) -> Tensor:
    """[1,T,H,D] each -> [1,T,H,D]. The layer is not told; layers are numbered when the trace is read."""
    hooks.check_causal(CALL, is_causal, attention_mask)
    window = attention_mask.window if isinstance(attention_mask, hooks.MaskTag) else int(sliding_window or 0)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return torch.ops.llmc.attention(q, k, v, 0, float(scale), window, float(softcap or 0), None)
