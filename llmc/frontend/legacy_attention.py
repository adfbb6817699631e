"""Attention hooks for model families that do not use transformers' AttentionInterface.

While such a model is traced, our attention replaces the `_flash_attention_forward` that its flash class calls, or its
method `_attn`. The tables below list the families.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.auto.configuration_auto import model_type_to_module_name

from llmc.frontend import attention_interface

# Families whose flash class computes the same as their eager class. (gpt_neo's ignores the windows of local layers.)
FAMILIES = frozenset({"falcon", "gptj"})


@dataclass(frozen=True)
class Method:
    """A class whose attention is all in `_attn(q, k, v, mask)`; its scale (None: d ** -0.5) and its window, if any.

    `transposed`: whether keys are [1,H,D,T] instead of [1,H,T,D].
    """

    owner: str
    scale: float | None = None
    window: Callable[[Any], int | None] = lambda module: None
    transposed: bool = False


def _local_window(attention: Any) -> int | None:
    return int(attention.config.window_size) if attention.attention_type == "local" else None


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "codegen": Method("CodeGenAttention"),
        "gpt_neo": Method("GPTNeoSelfAttention", 1.0, _local_window),
        "gpt_neox_japanese": Method("GPTNeoXJapaneseAttention"),
        "openai-gpt": Method("Attention", transposed=True),
    }
)

CALL = "_flash_attention_forward"


@contextmanager
def llmc_attention(model_type: str) -> Iterator[None]:
    """Within this context, models of an older family are traced with our attention. Others are unaffected."""
    if model_type not in FAMILIES and model_type not in METHODS:
        yield
        return
    name = model_type_to_module_name(model_type)
    module: Any = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    tables = (v for k, v in vars(module).items() if k.endswith("_ATTENTION_CLASSES"))
    classes: dict[str, Any] = next(tables, {})
    with _flash(module, classes) if model_type in FAMILIES else _method(module, classes, METHODS[model_type]):
        yield


@contextmanager
def _method(module: Any, classes: dict[str, Any], method: Method) -> Iterator[None]:
    """Within this context, our attention replaces the method `_attn` of the class."""

    def attn(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *_: Any) -> list[Any]:
        """q, k, v [1,H,T,D] -> [1,H,T,D], and None for the scores."""
        attention_interface.check_causal(method.owner, True, attention_mask)
        scale = query.shape[-1] ** -0.5 if method.scale is None else method.scale
        q = query.to(value.dtype)
        k = (key.mT if method.transposed else key).to(value.dtype)
        window = attention_interface.checked_window(method.window(self))
        out = torch.ops.llmc.attention(q, k, value, 0, scale, window, 0.0, None)
        return [out.transpose(1, 2), None]

    owner = getattr(module, method.owner)
    before = owner._attn
    with ExitStack() as stack:
        if classes:
            stack.enter_context(replaced(classes, attention_interface.NAME, classes["eager"]))
        owner._attn = attn
        stack.callback(setattr, owner, "_attn", before)
        yield


@contextmanager
def _flash(module: Any, classes: dict[str, Any]) -> Iterator[None]:
    """Within this context, the flash class is selected, and it calls our attention."""
    autocast = torch.is_autocast_enabled  # raises for the meta device, on which nothing is autocast
    with (
        replaced(classes, attention_interface.NAME, classes["flash_attention_2"]),
        replaced(vars(module), CALL, _attention),
        replaced(
            vars(torch), "is_autocast_enabled", lambda device=None: device != "meta" and autocast(device or "cuda")
        ),
        _Slices(),
    ):
        yield


class _Slices(TorchFunctionMode):
    """Replace x[..., [k], :] by x[..., k:k+1, :]. The former makes an index tensor, which has no values on meta."""

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
    """Within this context, an entry of a namespace or table has another value."""
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
    """q, k, v [1,T,H,D] -> [1,T,H,D]. The layer is unknown here; `convert` numbers layers afterwards."""
    attention_interface.check_causal(CALL, is_causal, attention_mask)
    tagged = isinstance(attention_mask, attention_interface.MaskTag)
    window = attention_interface.checked_window(attention_mask.window if tagged else sliding_window)
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return torch.ops.llmc.attention(q, k, v, 0, float(scale), window, float(softcap or 0), None)
