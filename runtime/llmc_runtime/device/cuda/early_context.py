"""Contexts of CUDA that are made ahead, in another thread.

The driver's initialization and a GPU's context take some tenths of a second, about as long as reading the programs of
an artifact does.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from llmc_runtime.format.errors import LlmcError


class EarlyContext:
    """The primary context of a GPU that a thread retains. `take` passes it to the device that is opened next."""

    _by_number: ClassVar[dict[int, EarlyContext]] = {}

    def __init__(self, number: int) -> None:
        self._number = number
        self._context: Any = None
        self._thread = threading.Thread(target=self._retain, name=f"context of GPU {number}")

    @classmethod
    def begin(cls, number: int) -> None:
        """Begin to make the context of GPU `number`, unless one is already waiting for its device."""
        if number not in cls._by_number:
            cls._by_number[number] = early = cls(number)
            early._thread.start()

    @classmethod
    def take(cls, number: int) -> Any:
        """Return the retained context, which the caller has to release; None if none was begun, or if it failed."""
        early = cls._by_number.pop(number, None)
        if early is None:
            return None
        early._thread.join()
        return early._context

    def _retain(self) -> None:
        """Retain the context. Errors are left to the device, which tries again and reports them."""
        from llmc_runtime.device.cuda.driver import Cuda

        try:
            cuda = Cuda()
            device = cuda.ok(cuda.cu.cuDeviceGet(self._number))
            self._context = cuda.ok(cuda.cu.cuDevicePrimaryCtxRetain(device))
        except LlmcError:
            pass
