"""The one error type users see; it is not for programming mistakes, which stay ordinary exceptions."""

from __future__ import annotations


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

    def __str__(self) -> str:
        head = f"LLMC-{self.code}: {self.cause}"
        return f"{head}\n  Try: {self.remedy}" if self.remedy else head
