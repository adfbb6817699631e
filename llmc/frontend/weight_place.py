"""Where a model has a stored weight, as the decoders of quantised checkpoints need it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a model has a weight.

    classes: the names of its module's class and of that one's bases, the most derived first. shape: of the weight, ()
    if it is a part of a larger one, such as an expert of a stack.
    """

    classes: tuple[str, ...] = ("Linear",)
    shape: tuple[int, ...] = ()
