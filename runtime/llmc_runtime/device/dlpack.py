"""Memory as a DLPack capsule, which other frameworks take as an array of theirs; it knows no device and copies nothing.

Source: dmlc/dlpack's dlpack.h, versions 0.8 and 1.0. numpy makes the capsule, of an array that lies at the given
address and is never looked into: so the capsule's end and the consumer's are numpy's C code, which is safe in any
thread, amid an exception and behind the interpreter's end. What numpy cannot say of an array (its device, bf16) is
written over what it said.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

CPU, CUDA = 1, 2  # DLDeviceType
# DLDataTypeCode, and bytes of an element; types of which several share a byte are not here.
TYPES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "i8": (0, 1), "i16": (0, 2), "i32": (0, 4), "i64": (0, 8), "u8": (1, 1), "u16": (1, 2), "u32": (1, 4),
        "f16": (2, 2), "f32": (2, 4), "f64": (2, 8), "bf16": (4, 2), "bool": (6, 1),
        "f8e4m3": (10, 1), "f8e5m2": (12, 1), "f8e8m0": (14, 1),
    }
)  # fmt: skip


class Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned; before version 1 there is a DLManagedTensor, which begins with its tensor."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


def capsule(
    address: int,
    dtype: str,
    shape: tuple[int, ...],
    device: tuple[int, int],
    owner: object,
    max_version: tuple[int, int] | None = None,
) -> Any:
    """A capsule of a writable array in C order at `address` on `device` (DLDeviceType, number).

    `owner` lives as long as the capsule, or the array that a consumer makes of it. `max_version` is what the consumer
    knows: from (1, 0) on the capsule has a version, with numpy 2.1 or later. `dtype` is one of TYPES.
    """
    code, size = TYPES[dtype]
    count = math.prod(shape)
    memory: Any = (ctypes.c_uint8 * (count * size)).from_address(address)
    memory.owner = owner  # the array holds the memory, the capsule the array
    array: Any = np.ndarray(shape, f"u{size}", memory)
    versioned = max_version is not None and max_version[0] >= 1 and np.lib.NumpyVersion(np.__version__) >= "2.1.0"
    made = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    tensor = tensor_of(made)
    tensor.data = address if count else None
    tensor.device_type, tensor.device_id = device
    tensor.code = code
    return made


def tensor_of(capsule: Any) -> Tensor:
    """The structure inside a capsule that nobody has taken yet; it is gone with the capsule."""
    api = ctypes.pythonapi
    is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", api))
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
    if is_valid(capsule, b"dltensor_versioned"):
        return Versioned.from_address(pointer(capsule, b"dltensor_versioned")).tensor
    return Tensor.from_address(pointer(capsule, b"dltensor"))
