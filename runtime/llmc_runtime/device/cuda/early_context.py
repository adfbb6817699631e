"""A GPU's CUDA context, made in a thread while the artifact is read.

Initializing the driver and making the context take some tenths of a second, about as long as reading the programs.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from llmc_runtime.device.cuda.driver import Cuda


class EarlyContext:
    """The primary context of a GPU, retained by a thread. `take` gives it to the device that is opened on this GPU."""

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _by_number: ClassVar[dict[int, EarlyContext]] = {}

    def __init__(self, number: int) -> None:
        self._number = number
        self._cuda: Cuda | None = None
        self._device: Any = None
        self._context: Any = None
        self._thread = threading.Thread(target=self._retain, name=f"context of GPU {number}", daemon=True)

    @classmethod
    def begin(cls, number: int) -> None:
        """Begin to make the context of GPU `number`, unless one is already waiting for its device."""
        with cls._lock:
            if number not in cls._by_number:
                early = cls(number)
                early._thread.start()
                cls._by_number[number] = early

    @classmethod
    def take(cls, number: int) -> Any:
        """Return the retained context, which the caller has to release; None if none was begun, or if it failed."""
        early = cls._ended(number)
        return None if early is None else early._context

    @classmethod
    def discard(cls, number: int) -> None:
        """Release the context of GPU `number` if one is waiting for a device that will not be opened."""
        early = cls._ended(number)
        if early is not None and early._cuda is not None and early._context is not None:
            early._cuda.cu.cuDevicePrimaryCtxRelease(early._device)

    @classmethod
    def _ended(cls, number: int) -> EarlyContext | None:
        with cls._lock:
            early = cls._by_number.pop(number, None)
        if early is not None:
            early._thread.join()
        return early

    def _retain(self) -> None:
        """Retain the context. Errors are left to the device, which tries again and reports them."""
        try:
            self._cuda = cuda = Cuda()
            self._device = cuda.ok(cuda.cu.cuDeviceGet(self._number))
            self._context = cuda.ok(cuda.cu.cuDevicePrimaryCtxRetain(self._device))
        except Exception:
            pass
