"""Calls of NCCL in an artifact: kernels without a binary, whose file is a JSON object instead.

`function` is ALL_REDUCE (a sum) or ALL_GATHER, and `dtype` that of the elements that it counts. A launch passes the
operand, the result, and the number of elements of the operand as its only size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from llmc_runtime.format.json_fields import Fields, damaged, load_json
from llmc_runtime.format.manifest import Manifest
from llmc_runtime.format.record import Record, stored

ABI = "nccl-1"
ALL_REDUCE, ALL_GATHER = "ncclAllReduce", "ncclAllGather"
# dtype -> ncclDataType_t
DTYPES: Mapping[str, int] = MappingProxyType({"u8": 1, "i32": 2, "i64": 4, "f16": 6, "f32": 7, "bf16": 9})


@dataclass(frozen=True)
class NcclCall(Record):
    """A call: one of the functions, and the dtype of its elements."""

    function: str = stored(Fields.text)
    dtype: str = stored(Fields.text)

    def validate(self, where: str) -> None:
        """See Record."""
        if self.function not in (ALL_REDUCE, ALL_GATHER):
            raise damaged(where, f"unknown function {self.function[:40]!r}")
        if self.dtype not in DTYPES:
            raise damaged(where, f"NCCL has no dtype {self.dtype[:40]!r}")

    @classmethod
    def load(cls, data: bytes, where: str) -> NcclCall:
        """Parse a file; raise LlmcError E103 or E108 if it is invalid."""
        return cls.read(load_json(data, where), where)


def uses_nccl(manifest: Manifest) -> bool:
    """Whether the ranks of an artifact exchange results by NCCL."""
    return any(kernel.abi == ABI for kernel in manifest.kernels)
