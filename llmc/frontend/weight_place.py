"""The place of a stored weight in a model, for the decoders of quantised checkpoints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The place of a weight in a model.

    classes: the names of its module's class and of its base classes, the most derived first. shape: of the weight, ()
    if it is a part of a larger one, such as an expert of a stack.
    """

    classes: tuple[str, ...] = ("Linear",)
    shape: tuple[int, ...] = ()
