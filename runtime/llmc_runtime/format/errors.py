"""The one error type users see; it is not for programming mistakes, which stay ordinary exceptions."""

from __future__ import annotations

_ENVIRONMENT = frozenset({"E100", "E109", "E110", "E115", "E116", "E117", "E332", "E640"})


class LlmcError(Exception):
    """A failure with a stable code, its cause and what to do about it.

    `code` is "E" and three digits: E1xx artifact, E2xx memory and limits, E3xx model and checkpoint,
    E4xx IR and passes, E5xx toolchain, E6xx request.
    """

    def __init__(self, code: str, cause: str, remedy: str = "") -> None:
        super().__init__(code, cause, remedy)
        self.code = code
        self.cause = cause
        self.remedy = remedy

    @property
    def of_environment(self) -> bool:
        """Whether the machine is the cause: what is installed, its CPU, GPU or driver. Commands exit with 3 then."""
        return self.code[:2] == "E5" or self.code in _ENVIRONMENT

    def __str__(self) -> str:
        head = f"LLMC-{self.code}: {self.cause}"
        return f"{head}\n  Try: {self.remedy}" if self.remedy else head
