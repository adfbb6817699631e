"""Pauses garbage collections while many objects are made of which none becomes garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collections() -> Iterator[None]:
    """Pause garbage collections in the block, for all threads. If they are disabled already, they remain so."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def lasting_objects() -> Iterator[None]:
    """Leave objects that exist at the end of the block out of later collections (gc.freeze), which would delay a step.

    Garbage is collected before the block: fewer objects have to be searched then. There are no collections in it.
    """
    gc.collect()
    with paused_collections():
        yield
        gc.freeze()
