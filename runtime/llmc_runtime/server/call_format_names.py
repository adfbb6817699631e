"""The values of `--tool-call-parser`: the names of call formats, ours and those of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload


class FormatNames(Sequence[str]):
    """Our names, from tool_calls.registry, which is imported when the first one is needed.

    `in` also finds the names of installed packages; these are looked up only for a name that is not ours.
    """

    def __contains__(self, name: object) -> bool:
        from llmc_runtime.server.tool_calls.registry import is_offered

        return isinstance(name, str) and (name in self._ours() or is_offered(name))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        """See Sequence."""
        return self._ours()[index]

    def __len__(self) -> int:
        return len(self._ours())

    @staticmethod
    def _ours() -> Sequence[str]:
        from llmc_runtime.server.tool_calls.registry import names

        return ("auto", *names(), "none")
