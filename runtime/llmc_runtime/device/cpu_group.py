"""The memory that the ranks of a group share on a CPU, and the functions of a step unit that use it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

import numpy as np

from llmc_runtime.device.device import Member, group_ended
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.heartbeat import SHARED_BYTES


class CpuGroup:
    """Makes a thread pool of a step unit one rank of a group.

    Raises LlmcError E112 if the unit has no collectives, and E203 if there is too little memory.
    """

    def __init__(self, unit: ctypes.CDLL, pool: ctypes.c_void_p, threads: int, member: Member) -> None:
        self._member = member
        try:
            nbytes, group_size, join = unit.llmc_group_bytes, unit.llmc_group_size, unit.llmc_group_join
            self._error, self._fail = unit.llmc_group_error, unit.llmc_group_fail
        except AttributeError:
            raise LlmcError("E112", "the kernels cannot run as several ranks", "recompile the artifact") from None
        nbytes.restype = group_size.restype = ctypes.c_int64
        try:
            size = nbytes(member.ranks, threads)  # the same in all ranks
            os.ftruncate(member.memory, SHARED_BYTES + size)
            self._area = mmap.mmap(member.memory, size, offset=SHARED_BYTES)
        except OSError as error:
            cause = f"the memory of {member.ranks} ranks cannot be allocated: {error.strerror}"
            raise LlmcError("E203", cause, "stop other programs") from None
        self._address = ctypes.c_void_p(np.frombuffer(self._area, np.uint8).ctypes.data)
        self._group = ctypes.create_string_buffer(group_size())
        join.restype = None
        join.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 2 + [ctypes.c_int64]
        join(pool, self._group, self._address, member.rank, member.ranks, int(member.limit * 1e9))

    def check(self) -> None:
        """Raise LlmcError E119 if the group has ended."""
        error = self._error(self._address)
        if error == errno.ETIMEDOUT:
            raise group_ended(f"a rank did not finish its part of a step within {self._member.limit:g} s")
        if error:
            raise group_ended("a rank has ended")

    def cancel(self) -> None:
        """End the group; may be called from any thread."""
        self._fail(self._address, errno.ECANCELED)
