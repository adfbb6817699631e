"""The compiler's error type. Programming errors stay ordinary Python exceptions."""

from __future__ import annotations

from typing import Any

from llmc_runtime.format.errors import LlmcError


class Diagnostic(LlmcError):
    """An error that the user can act on.

    `code` is "E" and three digits: E3xx for models and checkpoints, E4xx for IR and passes, E5xx for toolchains. `node`
    is the IR node concerned, if any; `loc` is the module path in the model and defaults to the node's. Both are
    prepended to the cause, so that `str(error)` names the place.
    """

    def __init__(self, code: str, cause: str, remedy: str = "", node: Any = None, loc: str = "") -> None:
        self.node = node
        self.loc = loc or (node.loc if node is not None else "")
        where = " at ".join(filter(None, (node.op.name if node is not None else "", self.loc)))
        super().__init__(code, f"{where}: {cause}" if where else cause, remedy)
