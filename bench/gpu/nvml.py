"""Clock, power and throttle reasons of all GPUs through NVML (libnvidia-ml.so.1), sampled by a separate process."""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import NamedTuple

LIBRARY = "libnvidia-ml.so.1"
INTERVAL = 0.0005  # seconds between two rounds of readings
SM_CLOCK = 1  # NVML_CLOCK_SM
POWER_INSTANT = 186  # NVML_FI_DEV_POWER_INSTANT, milliwatts
REASONS = {  # bits of nvmlDeviceGetCurrentClocksThrottleReasons; without a load, a GPU is idle
    0x1: "idle", 0x2: "setting", 0x4: "software power cap", 0x8: "hardware slowdown", 0x10: "sync boost",
    0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake", 0x100: "display",
}  # fmt: skip


class Sample(NamedTuple):
    """A reading of a GPU: when (`time.perf_counter_ns`), and its SM clock, power, and throttle reasons (bits)."""

    ns: int
    gpu: int
    mhz: int
    milliwatts: int
    reasons: int


class _FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = [
        ("field", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong), ("type", ctypes.c_int), ("status", ctypes.c_int), ("value", ctypes.c_uint64),
    ]  # fmt: skip


class Nvml:
    """All GPUs of this machine. Raises OSError if there is no NVML, RuntimeError if it refuses a call."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._call("nvmlInit_v2")
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._handles = [ctypes.c_void_p() for _ in range(count.value)]
        for i, handle in enumerate(self._handles):
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(i), ctypes.byref(handle))

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with {status}")

    def read(self) -> list[Sample]:
        """Read every GPU once."""
        return [self._sample(i, handle) for i, handle in enumerate(self._handles)]

    def _sample(self, gpu: int, handle: ctypes.c_void_p) -> Sample:
        clock, reasons, power = ctypes.c_uint(), ctypes.c_ulonglong(), _FieldValue(field=POWER_INSTANT)
        ns = time.perf_counter_ns()
        self._call("nvmlDeviceGetClockInfo", handle, SM_CLOCK, ctypes.byref(clock))
        self._call("nvmlDeviceGetCurrentClocksThrottleReasons", handle, ctypes.byref(reasons))
        self._call("nvmlDeviceGetFieldValues", handle, 1, ctypes.byref(power))
        milliwatts = power.value & 0xFFFFFFFF if not power.status else 0
        return Sample((ns + time.perf_counter_ns()) // 2, gpu, clock.value, milliwatts, reasons.value)


def reasons_of(samples: Iterable[Sample]) -> list[str]:
    """Return the names of all reasons that the samples have, each with its share of the samples in percent."""
    masks = [sample.reasons for sample in samples]
    counts = {name: sum(bool(mask & bit) for mask in masks) for bit, name in REASONS.items()}
    return [f"{name} {count * 100 // len(masks)} %" for name, count in counts.items() if count]


def _sample_until_told(link: Connection) -> None:
    nvml, samples = Nvml(), []
    link.send("ready")
    while not link.poll(INTERVAL):
        samples += nvml.read()
    link.send(samples)


class Sampler:
    """A context in which another process samples all GPUs; `samples` are there when it ends."""

    samples: list[Sample]

    def __enter__(self) -> Sampler:
        self.samples = []
        self._link, other = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_sample_until_told, args=(other,))
        self._process.start()
        other.close()
        try:
            self._link.recv()
        except EOFError:
            raise RuntimeError("NVML cannot be sampled; the process that tried has printed why") from None
        return self

    def __exit__(self, *exception: object) -> None:
        self._link.send("stop")
        self.samples = self._link.recv()
        self._process.join()
