"""Exports memory as a DLPack capsule for use by other frameworks, without a copy.

Implements versions 0.8 and 1.0 of dmlc/dlpack's dlpack.h. NumPy creates the capsule, from an array at the given address
whose contents are never read. The deleters are therefore NumPy's C code, which is safe in any thread, during exceptions
and at interpreter shutdown. The fields that NumPy cannot express (the device, bf16) are overwritten afterwards.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

CPU, CUDA = 1, 2  # DLDeviceType
# Our dtypes -> (DLDataTypeCode, bytes per element). Types that pack several elements into a byte are not supported.
TYPES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "i8": (0, 1), "i16": (0, 2), "i32": (0, 4), "i64": (0, 8), "u8": (1, 1), "u16": (1, 2), "u32": (1, 4),
        "f16": (2, 2), "f32": (2, 4), "f64": (2, 8), "bf16": (4, 2), "bool": (6, 1),
        "f8e4m3": (10, 1), "f8e4m3fnuz": (11, 1), "f8e5m2": (12, 1), "f8e8m0": (14, 1),
    }
)  # fmt: skip


class Tensor(ctypes.Structure):
    """struct DLTensor."""

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
    """struct DLManagedTensorVersioned. Its predecessor before version 1, DLManagedTensor, begins with the tensor."""

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
    """Return a capsule of a writable, C-contiguous array at `address` on `device` (DLDeviceType, ordinal).

    `dtype` is a key of TYPES. `owner` is kept alive as long as the capsule, or the consumer's array. `max_version` is
    the newest DLPack version that the consumer supports; from (1, 0) on, and with NumPy 2.1 or later, the capsule is
    versioned.
    """
    code, size = TYPES[dtype]
    count = math.prod(shape)
    memory: Any = (ctypes.c_uint8 * (count * size)).from_address(address)
    memory.owner = owner  # the array keeps the memory alive, and the capsule keeps the array alive
    array: Any = np.ndarray(shape, f"u{size}", memory)
    versioned = max_version is not None and max_version[0] >= 1 and np.lib.NumpyVersion(np.__version__) >= "2.1.0"
    exported = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
    tensor = tensor_of(exported)
    tensor.data = address if count else None
    tensor.device_type, tensor.device_id = device
    tensor.code = code
    return exported


def tensor_of(capsule: Any) -> Tensor:
    """Return the DLTensor inside a capsule that has not been consumed. It is valid as long as the capsule."""
    api = ctypes.pythonapi
    is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", api))
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
    if is_valid(capsule, b"dltensor_versioned"):
        return Versioned.from_address(pointer(capsule, b"dltensor_versioned")).tensor
    return Tensor.from_address(pointer(capsule, b"dltensor"))
