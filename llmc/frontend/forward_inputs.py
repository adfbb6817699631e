"""Gives a model's forward the arguments `position_ids` and `logits_to_keep`, which a trace needs, if it lacks one."""

from __future__ import annotations

import inspect
from typing import Any

import torch


def keep_rows(model: Any) -> None:
    """Give a model whose forward computes logits of every token the argument `logits_to_keep`, if it has a head.

    The head's input is reduced to these rows.
    """
    forward, head = model.forward, model.get_output_embeddings()
    accepted = inspect.signature(forward).parameters
    if head is None or "logits_to_keep" in accepted or "position_ids" not in accepted:
        return
    options = {"use_cache": False} if "use_cache" in accepted else {}
    rows_to_keep: list[torch.Tensor] = []

    def of_rows(input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor) -> Any:
        rows_to_keep[:] = [logits_to_keep]
        return forward(input_ids=input_ids, position_ids=position_ids, **options)

    head.register_forward_pre_hook(lambda _, args: (args[0][:, rows_to_keep[0]],))
    model.forward = of_rows


def take_positions(model: Any) -> None:
    """Give a model whose forward passes `position_ids` on among its other keyword arguments an argument of that name.

    A forward that ignores them counts the packed tokens instead, which is rejected after the trace.
    """
    forward = model.forward
    accepted = inspect.signature(forward).parameters
    passes = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    if "position_ids" in accepted or "logits_to_keep" not in accepted or not passes:
        return

    def with_positions(input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor) -> Any:
        return forward(input_ids=input_ids, position_ids=position_ids, logits_to_keep=logits_to_keep, use_cache=False)

    model.forward = with_positions
